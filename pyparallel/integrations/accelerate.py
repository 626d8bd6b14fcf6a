"""Gossip and compressed gradients in scripts that use Accelerate."""

import copy
import weakref
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from ..compression import Compressor, ErrorFeedback, GradientCompression, TopK, compress_ddp
from ..gossip import Algorithm, GossipDataParallel, GossipState
from ..training import uncompiled
from ..training.arguments import require
from ..training.nonfinite import NonFinitePolicy
from .rank_files import load_rank_file, rank_file
from .versions import require_version

require_version("accelerate", "1.0")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
)

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)

# By the identity of its module, which lives as long.
_trainers: "weakref.WeakValueDictionary[int, GossipDataParallel]" = weakref.WeakValueDictionary()

__all__ = ["CompressedDDPKwargs", "RankStates", "prepare_gossip"]


def prepare_gossip(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    algorithm: Algorithm,
    **options: Any,
) -> tuple[GossipDataParallel, Any]:
    """Prepare a model and its optimizer for gossip; ``accelerator.prepare`` the rest.

    What ``accelerator`` saves of the model is the exact average of all ranks, which call
    ``save_state``, ``save_model`` and ``get_state_dict`` together. ``save_state`` also writes each
    rank's own state to a file of its own, from which ``load_state`` resumes bit for bit; a shuffled
    DataLoader needs Accelerate's ``use_seedable_sampler=True`` and ``set_epoch`` for that. To
    evaluate, enter ``with model.consensus() as averaged:`` on all ranks. ``unwrap_model`` returns
    the module, with this rank's own weights.

    Args:
        accelerator: of at least two processes; its mixed precision and accumulation apply.
        model: as of ``GossipDataParallel``, not prepared.
        optimizer: over the model's parameters, not prepared.
        algorithm: as of ``GossipDataParallel``, such as ``SGP(overlap=1)``.

    Return the trainer around the model, and the prepared optimizer. One process alone, and an
    accelerator that shards models, are a ValueError, a prepared optimizer a TypeError; others are
    as of ``GossipDataParallel``.
    """
    fix = "start the script by accelerate launch or torchrun"
    several = accelerator.num_processes > 1
    require(several, "accelerator must have at least 2 processes", "1", fix)
    kind, sharding = accelerator.distributed_type, getattr(accelerator, "parallelism_config", None)
    got = f"distributed_type {kind.value}, parallelism_config {sharding}"
    rule = "accelerator must leave a whole model on each rank"
    require(kind not in _SHARDED and sharding is None, rule, got, "leave them out")
    if isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError("optimizer must not be prepared, got an AcceleratedOptimizer; pass its own")
    module = accelerator.prepare_model(model, evaluation_mode=True)  # which is without DDP
    gossip = GossipDataParallel(module, optimizer, algorithm, **options)

    def skip_consensus(models: list[nn.Module], folder: str) -> None:
        models.remove(module)  # this rank's own weights are loaded instead

    show_module(accelerator, gossip)
    accelerator.register_load_state_pre_hook(skip_consensus)
    RankStates(accelerator, GossipState(gossip, optimizer))
    return gossip, accelerator.prepare_optimizer(optimizer)


class _ShowsModules(Accelerator):  # type: ignore[misc]  # untyped
    """Unwraps a trainer as Accelerate does DDP, and takes its consensus for the model's state.

    Accelerate asks whether a model is an instance of torch's wrappers, and has no hook for others.
    """

    @override
    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module = model.module if isinstance(model, GossipDataParallel) else model
        return super().unwrap_model(module, *args, **kwargs)

    @override
    def get_state_dict(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gossip = _trainers.get(id(uncompiled(self.unwrap_model(model))))
        if gossip is None or not gossip.is_open:
            return super().get_state_dict(model, *args, **kwargs)
        with gossip.consensus():
            return copy.deepcopy(gossip.state_dict())


def show_module(accelerator: Accelerator, gossip: GossipDataParallel) -> None:
    """Let an accelerator unwrap a trainer, and save its consensus; all ranks save together."""
    _trainers[id(gossip.module)] = gossip
    kind = type(accelerator)
    if not issubclass(kind, _ShowsModules):
        accelerator.__class__ = type(kind.__name__, (_ShowsModules, kind), {})


class RankStates:
    """Save what differs between ranks in ``save_state``, and load it in ``load_state``.

    A ``state`` is such as ``CompressedDDPKwargs.state``. Each rank has a file in the folder; one
    that is missing or damaged is a ValueError on all ranks, which have loaded nothing.
    """

    def __init__(self, accelerator: Accelerator, state: Any) -> None:
        self._state = state
        self._loaded: dict[str, Any] = {}
        self._prefix = f"custom-{len(accelerator._custom_objects)}"
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._read)  # before anything is loaded
        accelerator.register_for_checkpointing(self)  # which is loaded last

    def _save(self, models: Any, weights: Any, folder: Any) -> None:
        torch.save(self._state.state_dict(), rank_file(f"{folder}/{self._prefix}"))

    def _read(self, models: Any, folder: Any) -> None:
        self._loaded = load_rank_file(f"{folder}/{self._prefix}")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing for Accelerate's own file, which the main process alone writes."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this rank's file holds; all ranks call it together."""
        self._state.load_state_dict(self._loaded)
        self._loaded = {}


@dataclass
class CompressedDDPKwargs(DistributedDataParallelKwargs):  # type: ignore[misc]  # untyped
    """Compress gradients: ``Accelerator(kwargs_handlers=[CompressedDDPKwargs(compressor=...)])``.

    Args:
        compressor: such as ``ErrorFeedback(TopK(0.01))``.
        nonfinite: as of ``compress_ddp``; None: "allow" in fp16, whose GradScaler then skips the
            step on all ranks, else "raise".
    """

    compressor: Compressor = field(default_factory=lambda: ErrorFeedback(TopK(0.01)))
    nonfinite: NonFinitePolicy | None = None

    def __post_init__(self) -> None:
        self._state: GradientCompression | None = None
        if self.comm_hook != DDPCommunicationHookType.NO:
            raise ValueError(
                "comm_hook must not be given to CompressedDDPKwargs: DDP has one hook, which "
                f"compresses; got {self.comm_hook}"
            )

    # Accelerate looks a handler up by its exact class.
    @property  # type: ignore[misc]  # where object has an attribute
    def __class__(self) -> Any:
        return DistributedDataParallelKwargs

    @property
    def state(self) -> GradientCompression:
        """Return the state of the hook, with ``metrics()``, once a model is prepared."""
        if self._state is None:
            raise RuntimeError(
                "state must be read after accelerator.prepare(model) with at least 2 processes, "
                "got no hook: nothing is compressed"
            )
        return self._state

    @override
    def to_dict(self, *args: Any) -> dict[str, Any]:
        names = {each.name for each in fields(DistributedDataParallelKwargs)}
        return {k: v for k, v in super().to_dict().items() if k in names}

    @override
    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        is_scaled = AcceleratorState().mixed_precision == "fp16"
        policy = self.nonfinite or ("allow" if is_scaled else "raise")
        self._state = compress_ddp(model, self.compressor, nonfinite=policy)
