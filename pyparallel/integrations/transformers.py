"""Gossip and compressed gradients in the ``Trainer`` of transformers."""

import copy
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from ..compression import Compressor, GradientCompression
from ..gossip import Algorithm, GossipDataParallel, GossipState
from ..training.arguments import require
from .accelerate import CompressedDDPKwargs, show_module
from .rank_files import load_rank_file, rank_file
from .versions import require_version

require_version("transformers", "5.6")

from transformers import Trainer  # noqa: E402

__all__ = ["CompressedTrainer", "GossipTrainer"]


class GossipTrainer(Trainer):
    """Train by gossip: ``GossipTrainer(model, args, ..., algorithm=SGP(overlap=1))``.

    With a trainer of your own: ``class Mine(GossipTrainer, SFTTrainer)``. What is evaluated and
    saved, and the model after ``train``, is the exact average of all ranks; ``evaluate`` and
    ``save_model`` inside ``train`` are called by all ranks together. Each rank's own state is in
    the folder ``gossip`` of a checkpoint: ``resume_from_checkpoint`` goes on bit for bit. Logs have
    the first rank's ``metrics()``.

    Args:
        algorithm, gossip_options: arguments of ``GossipDataParallel``.

    One rank alone, FSDP or DeepSpeed, and a checkpoint of another number of ranks are a ValueError.
    """

    def __init__(
        self,
        *args: Any,
        algorithm: Algorithm,
        gossip_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_ranks(self)
        self._algorithm, self._options = algorithm, gossip_options or {}

    @property
    def gossip(self) -> GossipDataParallel:
        """Return the trainer around the model, once ``train`` has wrapped it."""
        if not isinstance(self.model_wrapped, GossipDataParallel):
            raise RuntimeError("gossip must be read once train() has begun, got no trainer")
        return self.model_wrapped

    @override
    def _wrap_model(
        self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any
    ) -> nn.Module:
        if not training or isinstance(model, GossipDataParallel):
            return model
        module = self.accelerator.prepare_model(model, evaluation_mode=True)  # without DDP
        optimizer = cast(Any, self.optimizer)
        gossip = GossipDataParallel(module, optimizer, self._algorithm, **self._options)
        show_module(self.accelerator, gossip)  # of which compute_loss asks the class
        return gossip

    def _consensus(self) -> AbstractContextManager[Any]:
        is_gossip = isinstance(self.model_wrapped, GossipDataParallel)
        return self.gossip.consensus() if self.is_in_train and is_gossip else nullcontext()

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        is_best = self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None
        with nullcontext() if is_best else self.gossip.consensus():
            weights = copy.deepcopy(self.gossip.state_dict())
        self.gossip.load_state_dict(weights)  # with messages in flight merged before
        return result

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._consensus():
            return super().evaluate(*args, **kwargs)

    @override
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._consensus():
            super().save_model(*args, **kwargs)

    @override
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.is_in_train and "loss" in logs:
            logs = {**logs, **self.gossip.metrics()}
        super().log(logs, *args, **kwargs)

    def _state(self) -> GossipState:
        prepared: Any = self.optimizer
        return GossipState(self.gossip, prepared.optimizer)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        save({"gossip": self._state()}, checkpoint_id=os.path.join(output_dir, "gossip"))

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._state().load(os.path.join(checkpoint, "gossip"))


class CompressedTrainer(Trainer):
    """Compress gradients: ``CompressedTrainer(model, args, ..., compressor=TopK(0.01))``.

    Each rank's residuals are in a file of a checkpoint: ``resume_from_checkpoint`` goes on bit for
    bit. Logs have the first rank's ``metrics()``.

    Args:
        compressor: of all gradients; None: ``ErrorFeedback(TopK(0.01))``.
    """

    def __init__(self, *args: Any, compressor: Compressor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_ranks(self)
        options = self.accelerator.ddp_handler.to_dict()  # by the arguments ddp_*
        if compressor is not None:
            options["compressor"] = compressor
        self.accelerator.ddp_handler = CompressedDDPKwargs(**options)

    @property
    def compression(self) -> GradientCompression:
        """Return the state of the hook, once ``train`` has wrapped the model."""
        return cast(CompressedDDPKwargs, self.accelerator.ddp_handler).state

    @override
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.is_in_train and "loss" in logs:
            logs = {**logs, **self.compression.metrics()}
        super().log(logs, *args, **kwargs)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        os.makedirs(output_dir, exist_ok=True)  # perhaps before the main process does
        torch.save(self.compression.state_dict(), rank_file(f"{output_dir}/compression"))

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.compression.load_state_dict(load_rank_file(f"{checkpoint}/compression"))


def check_ranks(trainer: Trainer) -> None:
    """Raise unless a trainer has several ranks, a whole model on each, and one way to train."""
    name = type(trainer).__name__
    fix = "start the script by torchrun or accelerate launch"
    require(trainer.args.world_size > 1, f"{name} must have at least 2 ranks", "1", fix)
    options = ("fsdp", "deepspeed", "parallelism_config")
    sharding = [option for option in options if getattr(trainer.args, option, None)]
    rule, got = f"{name} must have a whole model on each rank", f"args with {', '.join(sharding)}"
    require(not sharding, rule, got, "leave it out")
    if isinstance(trainer, GossipTrainer) and isinstance(trainer, CompressedTrainer):
        raise TypeError(
            f"{name} must be a GossipTrainer or a CompressedTrainer, got both: gossip has no "
            "gradients to compress; SGP(topology, compressor=...) compresses its messages"
        )
