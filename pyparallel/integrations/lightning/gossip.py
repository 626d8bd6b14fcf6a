"""A strategy that trains by gossip."""

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from ...gossip import SGP, Algorithm, GossipDataParallel, GossipState
from ...training import consensus
from ...training.arguments import require
from ...training.nonfinite import NonFinitePolicy
from .rank_files import RankFiles


class GossipStrategy(RankFiles):
    """Train by gossip.

    Validation inside ``fit``, the weights in a checkpoint, and the module after ``fit`` have the
    exact average of all ranks, also of an EMA by a callback of Lightning's. When a callback
    unfreezes parameters, the module is wrapped again, from the average. To resume bit for bit, each
    rank's own state is in a file beside the checkpoint, ``epoch=1.ckpt.rank-0-of-4``: keep them
    together. With accumulated batches only the last one's step communicates. Several optimizers,
    which Lightning has in manual optimization, take one step each in every training step.

    Args:
        algorithm: as of ``GossipDataParallel``; None: ``SGP()``.
        bucket_cap_mb, nonfinite: as of ``GossipDataParallel``.
        kwargs: of Lightning's DDPStrategy, but those of DistributedDataParallel and its hooks.

    One rank alone, layers that synchronize their batch statistics, and a checkpoint of another
    number of ranks are a ValueError; arguments of DistributedDataParallel are a TypeError.
    """

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        *,
        bucket_cap_mb: float | None = None,
        nonfinite: NonFinitePolicy = "raise",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        hooks = {k: v for k, v in kwargs.items() if k.startswith("ddp_") and v is not None}
        if unused := [*hooks, *self._ddp_kwargs]:
            raise TypeError(
                f"GossipStrategy must not be given arguments of DistributedDataParallel, got "
                f"{', '.join(unused)}; gossip averages parameters and has no use for them"
            )
        self._algorithm = SGP() if algorithm is None else algorithm
        self._options: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, "nonfinite": nonfinite}
        self._consensus, self._replaced = ExitStack(), ExitStack()
        self._saved: dict[str, Any] | None = None  # at the end of fit

    @override
    def configure_ddp(self) -> None:
        """Leave the module as it is: it is wrapped when it has its optimizers."""

    @property
    def gossip(self) -> GossipDataParallel:
        """Return the trainer around the module, inside ``fit``."""
        if not isinstance(self.model, GossipDataParallel):
            raise RuntimeError("GossipStrategy.gossip must be read inside fit, got no trainer")
        return self.model

    @override
    def setup(self, trainer: Any) -> None:
        rule = "sync_batchnorm must be False with GossipStrategy"
        fix = "statistics are each rank's own, averaged in validation"
        got = "True: it would wait for all ranks in every forward"
        require(self._layer_sync is None, rule, got, fix)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.lightning_module is not None:
            self._saved = None
            self._wrap()
            if not any(isinstance(callback, _BeforeOthers) for callback in trainer.callbacks):
                trainer.callbacks.insert(0, _BeforeOthers())
                trainer.callbacks.append(_AfterOthers())

    def _wrap(self) -> None:
        self._given = set(map(id, self._parameters()))
        self._wrapped = {id(each) for each in self._parameters() if each.requires_grad}
        self.model = GossipDataParallel(
            cast(Any, self.lightning_module),
            self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers,
            self._algorithm,
            **self._options,
        )

    def _parameters(self) -> Iterator[Any]:
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            yield from group["params"]

    def _include_new_parameters(self) -> None:
        """Wrap the module again, from the consensus, if a callback has unfrozen parameters."""
        trained = {id(parameter) for parameter in self._parameters() if parameter.requires_grad}
        if not trained <= self._wrapped:
            self.gossip.load_state_dict(self.lightning_module_state_dict())
            self.gossip.close()
            self._wrap()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._include_new_parameters()

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for parameter in self._parameters():
            if id(parameter) not in self._given:  # Lightning's finetuning adds it, but frozen
                parameter.requires_grad_(True)
        self._include_new_parameters()
        super().load_optimizer_state_dict(checkpoint)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.gossip.no_sync():
            yield

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if len(self.optimizers) == 1 or getattr(self.precision_plugin, "scaler", None):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        closure()  # several optimizers are stepped without closures
        self.precision_plugin._after_closure(cast(Any, self.lightning_module), optimizer)
        return optimizer.step(**kwargs)

    @override
    def on_validation_start(self) -> None:
        if self._is_fitting():
            self._consensus.enter_context(self.gossip.consensus())
            self._sums = self._sum()

    @override
    def on_validation_end(self) -> None:
        self._consensus.close()

    def _tensors(self) -> list[Tensor]:
        module = cast(Any, self.lightning_module)
        return [
            each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()
        ]

    def _sum(self) -> list[float]:
        return [float(tensor.double().sum()) for tensor in self._tensors()]

    def _average(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.reduce(tensor.double(), reduce_op="mean") for tensor in tensors]

    def average_replaced(self) -> None:
        """Validate the average over ranks of what a callback has put into the module, as an EMA."""
        if self._is_fitting() and self.reduce_boolean_decision(
            self._sums != self._sum(), all=False
        ):
            tensors = self._tensors()
            self._replaced.enter_context(consensus.assigned(tensors, self._average(tensors)))

    def restore_replaced(self) -> None:
        """Give the callback back what it has put into the module of this rank."""
        self._replaced.close()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the consensus, on all ranks together; ends that of a validation."""
        if not self._is_fitting():
            return super().lightning_module_state_dict()
        self._consensus.close()
        with self.gossip.consensus():
            state = copy.deepcopy(self.gossip.state_dict())
        self._returned = weakref.ref(cast(Any, state))
        return state

    @override
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Save the average over ranks of the weights that a callback has put there, as an EMA."""
        state = checkpoint["state_dict"]
        if self._is_fitting() and state is not self._returned():
            keys = [key for key, each in state.items() if torch.is_floating_point(each)]
            averages = zip(keys, self._average(state[key] for key in keys), strict=True)
            state = {**state, **{key: each.to(state[key].dtype) for key, each in averages}}
            checkpoint = {**checkpoint, "state_dict": state}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def keep_state(self) -> None:
        """Keep this rank's state, for a checkpoint after ``fit``, and load the consensus.

        Then nothing is in flight when callbacks write their weights into the module.
        """
        self._saved = self.rank_state()
        self.on_train_end()

    @override
    def on_train_end(self) -> None:
        """Load the consensus, of what callbacks have put into the module too."""
        self.gossip.load_state_dict(self.lightning_module_state_dict())

    @override
    def rank_state(self) -> dict[str, Any]:
        return self._saved or GossipState(self.gossip, self.optimizers).state_dict()

    @override
    def load_rank_state(self, state: dict[str, Any]) -> None:
        GossipState(self.gossip, self.optimizers).load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """Return ``GossipDataParallel.metrics()``, for ``log_dict``; nothing outside ``fit``."""
        return self.gossip.metrics() if self._is_fitting() else {}

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._replaced.close()
        self._consensus.close()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._consensus.close()
        if self._is_fitting():
            self.gossip.close()
            self.model = self.lightning_module
        super().teardown()

    def _is_fitting(self) -> bool:
        return isinstance(self.model, GossipDataParallel)


class _BeforeOthers(Callback):
    """Runs first of a trainer's callbacks."""

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.keep_state()

    @override
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.restore_replaced()


class _AfterOthers(Callback):
    """Runs last of them."""

    @override
    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.average_replaced()
