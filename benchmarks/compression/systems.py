"""The ways to average gradients that are compared on links: ours and torch's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compression.training import dense_step
from benchmarks.gossip.trainers import bf16_unchecked
from pyparallel.compression import Cast, CommStats, Compressor, compress_ddp
from pyparallel.planning.recommend import CANDIDATES, HALF

BUCKET_MB = 2  # small like the model: as many buckets as a large model has of 25 MB
ALONE = "compute alone"


Wrapped = tuple[nn.Module, Callable[[], CommStats | None]]


@dataclass(frozen=True)
class System:
    """A way to average gradients."""

    name: str
    options: str
    # Wraps a module; returns the wrapped module and a function that returns the statistics
    # of its last step, or None if unknown
    wrap: Callable[[nn.Module], Wrapped]
    may_fail: bool = False  # it is torch's, and may not run here


def in_ddp(
    module: nn.Module, group: dist.ProcessGroup | None = None, bucket_mb: int = BUCKET_MB
) -> DistributedDataParallel:
    return DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )


def describe(compressor: Compressor | None) -> str:
    return "DistributedDataParallel alone" if compressor is None else repr(compressor)


def of_ours(name: str, compressor: Compressor | None) -> System:
    """Return DistributedDataParallel with one of our compressors, or with none."""

    def wrap(module: nn.Module) -> Wrapped:
        ddp = in_ddp(module)
        if compressor is None:
            sent = dense_step(module)
            return ddp, lambda: sent
        compression = compress_ddp(ddp, compressor)
        return ddp, lambda: compression.last_step

    return System(name, describe(compressor), wrap)


def of_torch(
    name: str,
    options: str,
    hook: Callable[..., Future],
    make_state: Callable[[dist.ProcessGroup], object] = lambda group: group,
    bucket_mb: int = BUCKET_MB,
) -> System:
    """Return DistributedDataParallel with one of torch's hooks, in a process group of its own.

    A hook that fails leaves collectives pending. The state of a hook is made from the group.
    """

    def wrap(module: nn.Module) -> Wrapped:
        group = dist.new_group()
        ddp = in_ddp(module, group, bucket_mb)
        ddp.register_comm_hook(make_state(group), hook)
        return ddp, lambda: None  # its bytes are not counted

    return System(f"torch {name}", options, wrap, may_fail=True)


def power_sgd_state(group: dist.ProcessGroup) -> powerSGD_hook.PowerSGDState:
    """Return torch's default state, but start in the second step, not in the thousandth."""
    return powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=4, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
    )


TORCH_BF16 = of_torch(
    "bf16, unchecked", "bf16_compress_hook, called by a hook of another name", bf16_unchecked
)
CASTS = (
    TORCH_BF16,
    of_ours(HALF.name, HALF.steady_state),
    of_ours("bf16, added in bf16", Cast(accumulate=torch.bfloat16)),
)
# Torch's PowerSGD starts collectives when others end, on gloo in a different order on each rank:
# with several buckets in flight, messages meet those of other buckets, and gloo ends the process.
_RANK_4 = "matrix_approximation_rank=4, one bucket"
_ONE_BUCKET = power_sgd_state, 1000
SYSTEMS = (
    System(ALONE, "", lambda module: (module, CommStats)),
    *(of_ours(each.name, each.steady_state) for each in CANDIDATES),
    of_torch("fp16", "fp16_compress_hook", default_hooks.fp16_compress_hook),
    of_torch("bf16", "bf16_compress_hook", default_hooks.bf16_compress_hook),
    TORCH_BF16,
    of_torch("PowerSGD", f"powerSGD_hook, {_RANK_4}", powerSGD_hook.powerSGD_hook, *_ONE_BUCKET),
    of_torch(
        "PowerSGD, batched",
        f"batched_powerSGD_hook, {_RANK_4}",
        powerSGD_hook.batched_powerSGD_hook,
        *_ONE_BUCKET,
    ),
    *(
        of_torch(
            f"int8 per {each}",
            f"quantization_per{each}_hook",
            getattr(quantization_hooks, f"quantization_per{each}_hook"),
        )
        for each in ("tensor", "channel")
    ),
)
