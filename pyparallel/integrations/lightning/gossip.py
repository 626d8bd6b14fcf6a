"""A strategy that trains by gossip."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from ...gossip import SGP, Algorithm, GossipDataParallel, GossipState
from ...gossip.topology import OnePeerExponential
from ...training.arguments import check_callable, require
from ...training.nonfinite import NonFinitePolicy
from .rank_files import RankFiles


class GossipStrategy(RankFiles):
    """Train by gossip, with an algorithm for the number of ranks.

    Validation inside ``fit``, the weights in a checkpoint, and the module after ``fit`` have the
    exact average of all ranks. To resume bit for bit, each rank's own state is in a file beside the
    checkpoint, ``epoch=1.ckpt.rank-0-of-4``: keep them together. With accumulated batches only the
    last one's step communicates. Several optimizers, which Lightning has in manual optimization,
    take one step each in every training step.

    Args:
        algorithm_fn: returns the algorithm for a number of ranks, such as
            ``lambda n: SGP(Ring(n))``, which is called once in every ``fit``.
        bucket_cap_mb, nonfinite: as of ``GossipDataParallel``.
        kwargs: of Lightning's DDPStrategy, but those of DistributedDataParallel and its hooks.

    One rank alone, layers that synchronize their batch statistics, and a checkpoint of another
    number of ranks are a ValueError; arguments of DistributedDataParallel are a TypeError.
    """

    def __init__(
        self,
        algorithm_fn: Callable[[int], Algorithm] = lambda n: SGP(OnePeerExponential(n)),
        *,
        bucket_cap_mb: float | None = None,
        nonfinite: NonFinitePolicy = "raise",
        **kwargs: Any,
    ) -> None:
        rule = "a function of the number of ranks, such as lambda n: SGP(Ring(n))"
        check_callable("algorithm_fn", algorithm_fn, rule)
        super().__init__(**kwargs)
        hooks = {k: v for k, v in kwargs.items() if k.startswith("ddp_") and v is not None}
        if unused := [*hooks, *self._ddp_kwargs]:
            raise TypeError(
                f"GossipStrategy must not be given arguments of DistributedDataParallel, got "
                f"{', '.join(unused)}; gossip averages parameters and has no use for them"
            )
        self._algorithm_fn = algorithm_fn
        self._options: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, "nonfinite": nonfinite}
        self._consensus = ExitStack()
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

    def _wrap(self) -> None:
        self._given = set(map(id, self._parameters()))
        self._wrapped = {id(each) for each in self._parameters() if each.requires_grad}
        self.model = GossipDataParallel(
            cast(Any, self.lightning_module),
            self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers,
            self._algorithm_fn(self.world_size),
            **self._options,
        )

    def _parameters(self) -> Iterator[Any]:
        for group in (group for each in self.optimizers for group in each.param_groups):
            yield from group["params"]

    def _include_new_parameters(self) -> None:
        """Wrap the module again, from the consensus, if a callback has unfrozen parameters."""
        trained = {id(each) for each in self._parameters() if each.requires_grad}
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

    @override
    def on_validation_end(self) -> None:
        self._consensus.close()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the consensus, on all ranks together; ends that of a validation."""
        if not self._is_fitting():
            return super().lightning_module_state_dict()
        self._consensus.close()
        with self.gossip.consensus():
            return copy.deepcopy(self.gossip.state_dict())

    @override
    def on_train_end(self) -> None:
        """Keep this rank's state, for a checkpoint after ``fit``, and load the consensus."""
        self._saved, consensus = self.rank_state(), self.lightning_module_state_dict()
        self.gossip.load_state_dict(consensus)

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
