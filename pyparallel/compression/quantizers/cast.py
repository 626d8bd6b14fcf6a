"""Casts to 16-bit floats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from ...comm.collectives import Collectives
from ...ops._checks import check_tensor
from ...ops.mix import mix_unchecked
from ...training.arguments import check_one_of
from ..compressor import AttachPoint, Message, all_but
from ..layout import BufferLayout
from ..residual import Residual, check_no_residual
from ..state import CompressorState
from .blockwise import BlockwiseCompressor


@dataclass(frozen=True, repr=False)
class Cast(BlockwiseCompressor):
    """Casts to bfloat16, with float32's range, or float16, with more digits; rounds to nearest.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``. Magnitudes above float16's 65504 become inf
            or nan on all ranks.
        accumulate: dtype in which DistributedDataParallel's means are added up.
            ``torch.float32``: an all-to-all and an all-gather; their error is that of two
            roundings for any number of ranks. The same as ``dtype``: one all-reduce, with the bits
            of torch's ``bf16_compress_hook`` or ``fp16_compress_hook``. Each rank casts, then
            divides by the number of ranks, so that the sum overflows no sooner than an entry; each
            addition rounds, and the error grows with the number of ranks. It cannot be fed back.
    """

    dtype: torch.dtype = torch.bfloat16
    accumulate: torch.dtype = torch.float32
    granularity = 1
    accepts_all = True

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, (torch.bfloat16, torch.float16))
        check_one_of("accumulate", self.accumulate, (torch.float32, self.dtype))

    def __repr__(self) -> str:
        accumulate = "" if self._accumulates_float32 else f", accumulate={self.accumulate}"
        return f"Cast(dtype={self.dtype}{accumulate})"

    @property
    @override
    def takes_residual(self) -> bool:
        return self._accumulates_float32  # of other sums no rank knows the error

    @property
    @override
    def refusals(self) -> Mapping[AttachPoint, str]:
        rule = "compressor must not accumulate in 16 bits for {place}, got {self}; "
        policy = "use fully_shard's MixedPrecisionPolicy(reduce_dtype={self.dtype})"
        found = dict.fromkeys(all_but(AttachPoint.DDP), rule + "use Cast({self.dtype})")
        found[AttachPoint.FSDP_GRADIENTS] = rule + policy
        return {} if self._accumulates_float32 else found

    @property
    def _accumulates_float32(self) -> bool:
        return self.accumulate == torch.float32

    @override
    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Residual = None,
        **drops: bool,
    ) -> Tensor | None:
        if self._accumulates_float32:
            return super().mean_(x, state, collectives, residual, **drops)
        check_no_residual(residual)
        message = self._shares(x, state, collectives)
        collectives.all_reduce_(message)
        with collectives.stats.decoding():
            x.copy_(message)
        return None

    @property
    def starts_means(self) -> bool:
        """Whether `start_mean_` can be called: for sums of 16 bits."""
        return not self._accumulates_float32

    def start_mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives
    ) -> tuple[Future[Any], Callable[[Callable[[Tensor], None]], None]]:
        """Start the all-reduce of ``mean_``; return a future that completes when it ends.

        And a function to call then, which calls its argument with the mean, (numel,) of the dtype,
        and writes x.
        """
        message = self._shares(x, state, collectives)
        future = collectives.start_all_reduce_(message)

        def finish(inspect: Callable[[Tensor], None]) -> None:
            collectives.finish_all_reduce(future)
            inspect(message)
            with collectives.stats.decoding():
                x.copy_(message)

        return future, finish

    def _shares(self, x: Tensor, state: CompressorState, collectives: Collectives) -> Tensor:
        with collectives.stats.encoding():
            (message,) = self.compress(x, state)
            return message.div_(collectives.size)

    @override
    def _average(
        self,
        received: list[Tensor],
        state: CompressorState,
        collectives: Collectives,
        lost: Residual,
    ) -> tuple[Message, int | None]:
        if lost is not None:
            return super()._average(received, state, collectives, lost)
        with collectives.stats.decoding():
            mean, *others = received[0]
            if others:  # average in float32, round once
                masses = torch.ones(collectives.size, dtype=torch.float64, device=mean.device)
                mix_unchecked(mean, masses[0], others, masses[1:])
        return (mean,), None

    @override
    def sizes(self, numel: int) -> tuple[int, ...]:
        return (numel,)

    @override
    def encode(self, x: Tensor, state: CompressorState) -> Message:
        """Return ((numel,) of the dtype,)."""
        return (x.to(self.dtype, copy=True),)

    @override
    def decode(self, message: Message, layout: BufferLayout) -> Tensor:
        (values,) = message
        check_tensor("values", values, self.dtype, (layout.numel,), values.device)
        return values
