"""The ways to average gradients that are compared on links: ours, and those that torch has."""

from collections.abc import Callable
from dataclasses import dataclass

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
from pyparallel.compression import CommStats, Compressor, GradientCompression, ddp_hook
from pyparallel.recommend import CANDIDATES, Candidate

BUCKET_MB = 2  # small like the model: as many buckets as a large one has of 25 MB
ONE_BUCKET_MB = 1000
ALONE = "compute alone"


@dataclass(frozen=True)
class System:
    """A way to average gradients.

    Args:
        wrap: makes of a module what is called in its place, and says what its last step has sent,
            if anything knows.
    """

    name: str
    options: str
    wrap: Callable[[nn.Module], tuple[nn.Module, Callable[[], CommStats | None]]]


def unknown() -> None:
    """What a system has sent that does not count."""


def alone(module: nn.Module) -> tuple[nn.Module, Callable[[], CommStats | None]]:
    """Compute, and speak with nobody."""
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

    A hook that fails leaves collectives behind that nobody ends.
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
    """What torch's hooks without memory take for a state."""
    return group


def power_sgd_state(group: dist.ProcessGroup) -> powerSGD_hook.PowerSGDState:
    """Torch's defaults, from the second step on, where they would wait for the thousandth."""
    return powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=4, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
    )


def bf16_unchecked(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Without CUDA torch refuses its hook by name, although gloo adds bfloat16 as well."""
    return default_hooks.bf16_compress_hook(group, bucket)


def describe(compressor: Compressor | None) -> str:
    return "DistributedDataParallel alone" if compressor is None else repr(compressor)


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
    System("torch bf16, unchecked", "bf16_compress_hook, called by a hook of another name",
           Torch(stateless, bf16_unchecked)),
    # It starts collectives where others end, on gloo in another order on each rank: with several
    # buckets under way the ranks' messages meet those of other buckets, and gloo ends the process.
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
