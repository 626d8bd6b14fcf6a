"""The ways to average gradients that are compared on links: ours and torch's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compression.training import dense_wire_bytes
from pyparallel.compression import Cast, CommStats, Compressor, GradientCompression, ddp_hook
from pyparallel.recommend import CANDIDATES, HALF, Candidate

BUCKET_MB = 2  # small like the model: as many buckets as a large model has of 25 MB
ONE_BUCKET_MB = 1000
ALONE = "compute alone"


@dataclass(frozen=True)
class System:
    """A way to average gradients.

    Args:
        wrap: wraps a module; returns the wrapped module and a function that returns the statistics
            of its last step, or None if unknown.
    """

    name: str
    options: str
    wrap: Callable[[nn.Module], tuple[nn.Module, Callable[[], CommStats | None]]]


def unknown() -> None:
    """Return None: the system does not count its bytes."""


def alone(module: nn.Module) -> tuple[nn.Module, Callable[[], CommStats | None]]:
    """Compute without communication."""
    return module, CommStats


def in_ddp(
    module: nn.Module, group: dist.ProcessGroup | None = None, bucket_mb: int = BUCKET_MB
) -> DistributedDataParallel:
    return DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )


@dataclass(frozen=True)
class Ours:
    """DistributedDataParallel with one of our compressors, or with none."""

    candidate: Candidate

    def __call__(self, module: nn.Module) -> tuple[nn.Module, Callable[[], CommStats | None]]:
        """Wrap a module."""
        ddp = in_ddp(module)
        compressor = self.candidate.steady_state
        if compressor is None:
            num_bytes = 4 * sum(parameter.numel() for parameter in module.parameters())
            sent = CommStats(num_bytes, dense_wire_bytes(num_bytes, dist.get_world_size()))
            return ddp, lambda: sent
        compression, hook = ddp_hook(compressor, ddp)
        ddp.register_comm_hook(compression, hook)
        return ddp, lambda: last_step(compression)


def last_step(compression: GradientCompression) -> CommStats:
    return compression.last_step


@dataclass(frozen=True)
class Torch:
    """DistributedDataParallel with one of torch's hooks, in a process group of its own.

    A hook that fails leaves collectives pending.
    """

    make_state: Callable[[dist.ProcessGroup], object]
    hook: Callable[..., Future]
    bucket_mb: int = BUCKET_MB

    def __call__(self, module: nn.Module) -> tuple[nn.Module, Callable[[], CommStats | None]]:
        """Wrap a module."""
        group = dist.new_group()
        ddp = in_ddp(module, group, self.bucket_mb)
        ddp.register_comm_hook(self.make_state(group), self.hook)
        return ddp, unknown


def stateless(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group, which stateless torch hooks take as their state."""
    return group


def power_sgd_state(group: dist.ProcessGroup) -> powerSGD_hook.PowerSGDState:
    """Return torch's default state, but start in the second step, not in the thousandth."""
    return powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=4, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
    )


def bf16_unchecked(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Call torch's hook, which torch refuses by name without CUDA, though gloo adds bfloat16."""
    return default_hooks.bf16_compress_hook(group, bucket)


def describe(compressor: Compressor | None) -> str:
    return "DistributedDataParallel alone" if compressor is None else repr(compressor)


TORCH_BF16 = System(
    "torch bf16, unchecked",
    "bf16_compress_hook, called by a hook of another name",
    Torch(stateless, bf16_unchecked),
)
_HALF_SUMS = Candidate("bf16, added in bf16", Cast(accumulate=torch.bfloat16))
CASTS = (
    TORCH_BF16,
    *(System(each.name, describe(each.compressor), Ours(each)) for each in (HALF, _HALF_SUMS)),
)
SYSTEMS = (
    System(ALONE, "", alone),
    *(
        System(
            candidate.name,
            describe(candidate.steady_state),
            Ours(candidate),
        )
        for candidate in CANDIDATES
    ),
    System("torch fp16", "fp16_compress_hook", Torch(stateless, default_hooks.fp16_compress_hook)),
    System("torch bf16", "bf16_compress_hook", Torch(stateless, default_hooks.bf16_compress_hook)),
    TORCH_BF16,
    # It starts collectives when others end, on gloo in a different order on each rank: with several
    # buckets in flight, messages meet those of other buckets, and gloo ends the process.
    System("torch PowerSGD", "powerSGD_hook, matrix_approximation_rank=4, one bucket",
           Torch(power_sgd_state, powerSGD_hook.powerSGD_hook, ONE_BUCKET_MB)),
    System("torch PowerSGD, batched",
           "batched_powerSGD_hook, matrix_approximation_rank=4, one bucket",
           Torch(power_sgd_state, powerSGD_hook.batched_powerSGD_hook, ONE_BUCKET_MB)),
    System("torch int8 per tensor", "quantization_pertensor_hook",
           Torch(stateless, quantization_hooks.quantization_pertensor_hook)),
    System("torch int8 per channel", "quantization_perchannel_hook",
           Torch(stateless, quantization_hooks.quantization_perchannel_hook)),
)  # fmt: skip
