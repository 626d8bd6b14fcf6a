"""Entries at indices shared by all ranks, averaged as codes of a trained auto-encoder."""

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...comm.collectives import Collectives
from ...ops._corrupt import corrupt_counter, only_counting
from ...training.arguments import check_in, check_integer, require
from ..compressor import AttachPoint, Compressor, Message, all_but
from ..corrupt_messages import CorruptMessageError, with_sender
from ..layout import BufferLayout
from ..residual import Residual, clear_non_finite
from ..sparsifiers.top_k import TopK, count_of
from ..state import CompressorState
from .auto_encoder import (
    AutoEncoder,
    ConvAutoEncoder,
    decode_mean,
    init_training_state,
    train_step_,
)


@dataclass(frozen=True)
class Learned(Compressor):
    """Learned Gradient Compression over all-reduce (Abrahamyan et al., 2021, arXiv 2103.08870).

    Gradients of different ranks are correlated, and a small auto-encoder learns to exploit this.
    Three phases: first a dense all-reduce; then, while the auto-encoder trains, an all-reduce of
    the largest entries of one rank (ranks take turns); then an all-reduce of the codes of these
    entries, whose mean is decoded. From the second phase on, each rank also sends its innovation:
    the largest entries of its remaining error. The rest is lost without
    ``ErrorFeedback(Learned(...))``.

    Indices are sorted by the selecting rank's values, since only neighbors of similar value have a
    code shorter than they are. The paper sorts them by index, and has the innovation only in its
    parameter-server variant.

    Bytes sent, for k entries at shared indices and a code of length c (k / 4 by default): 4 k of
    indices, 8 per innovation to every rank. In the second phase there is an all-reduce of 4 k, and
    for training one of 4 c and one of 4 per weight (21008 by default); in the third one of 4 c
    alone. Codes stay float32, since shares of a rounded mean would not average to it. Each buffer
    (a DDP bucket) has its own auto-encoder, with 8 bytes per weight; ``state.common["loss"]`` is
    its last loss, below 1 if anything was learned.

    It only averages over ranks, so it supports DDP alone. All ranks decode, so their devices must
    be of one type. Codes of small parameters save nothing: use ``PerParameter`` with another
    compressor for these, and for the first and last layers as in the paper.

    Args:
        density: fraction of a buffer's entries at the shared indices, in (0, 1].
        innovation: fraction of a buffer's entries that each rank adds, in (0, 1]; at least one
            entry, so that a nan or an inf always propagates.
    """

    density: float = 0.001
    dense_steps: int = 200
    learning_steps: int = 300
    innovation: float = 0.00001
    learning_rate: float = 0.01
    auto_encoder: AutoEncoder = ConvAutoEncoder()  # noqa: RUF009 (it is immutable)
    fixed_length = False  # it depends on the phase
    refusals = dict.fromkeys(
        all_but(AttachPoint.DDP),
        "compressor must make single messages for {place}, got {self}, which only averages over "
        "all ranks; use ErrorFeedback(TopK({self.density!r}))",
    )

    def __post_init__(self) -> None:
        check_in("density", self.density, "(0, 1]")
        check_in("innovation", self.innovation, "(0, 1]")
        check_integer("dense_steps", self.dense_steps, 0)
        check_integer("learning_steps", self.learning_steps, 0)
        require(self.learning_rate > 0, "learning_rate must be > 0", self.learning_rate)

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        threshold = torch.zeros((), dtype=torch.float32, device=device)
        common = init_training_state(self.auto_encoder, device)
        return CompressorState(layout, rank, common=common, hints={"threshold": threshold})

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        self._refuse()

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        self._refuse()

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        step = state.step
        state.begin_message(x)
        total = x.to(torch.float32, copy=True) if residual is None else residual.add_(x)
        if step < self.dense_steps:
            mean = total.clone()
            total.zero_()
            collectives.all_reduce_(mean)
            x.copy_(mean.div_(collectives.size))
        elif x.numel():
            x.copy_(self._mean_of_largest(total, state, collectives, step))

    def _mean_of_largest(
        self, total: Tensor, state: CompressorState, collectives: Collectives, step: int
    ) -> Tensor:
        """Return the mean of what is sent; ``total`` becomes the error."""
        indices = self._share_indices(total, state, collectives, step % collectives.size)
        values = total[indices]
        if step < self.dense_steps + self.learning_steps:
            common, share = self._learn(values, state, collectives)
        else:
            common, share = self._average_codes(values, state, collectives)
        total.index_copy_(0, indices, values - share)
        return self._innovate(total, state, collectives).index_add_(0, indices, common)

    def _share_indices(
        self, total: Tensor, state: CompressorState, collectives: Collectives, source: int
    ) -> Tensor:
        """Broadcast the indices of one rank's largest entries, sorted by value: (k,) int64."""
        count = count_of(self.density, total.numel())
        if collectives.rank == source:
            with collectives.stats.encoding():
                values, ascending = ops.top_k(total, count, threshold=state.hints["threshold"])
                indices = ascending[values.argsort()]
        else:
            dtype = torch.int32 if total.numel() < 2**31 else torch.int64
            indices = torch.empty(count, dtype=dtype, device=total.device)
        collectives.broadcast_(indices, source)
        with with_sender(source):
            return _checked(indices, total.numel()).long()

    def _learn(
        self, values: Tensor, state: CompressorState, collectives: Collectives
    ) -> tuple[Tensor, Tensor]:
        """Train; return the mean of the values and this rank's share of it, its values."""
        mean = values.clone()
        collectives.all_reduce_(mean)
        mean.div_(collectives.size)
        train_step_(self.auto_encoder, state.common, values, mean, collectives, self.learning_rate)
        return mean, values

    def _average_codes(
        self, values: Tensor, state: CompressorState, collectives: Collectives
    ) -> tuple[Tensor, Tensor]:
        weights = state.common["weights"]
        with collectives.stats.encoding():
            code = self.auto_encoder.encode(weights, values)
        mean_code = code.clone()
        collectives.all_reduce_(mean_code)
        mean_code.div_(collectives.size)
        with collectives.stats.decoding():
            return decode_mean(self.auto_encoder, weights, code, mean_code, values.numel())

    def _innovate(self, total: Tensor, state: CompressorState, collectives: Collectives) -> Tensor:
        """Return the mean of all ranks' innovations, which are set to 0 in ``total``."""
        innovation = TopK(self.innovation)
        with collectives.stats.encoding():
            values, indices = ops.top_k(total, count_of(self.innovation, total.numel()))
            total.index_fill_(0, indices.long(), 0)
            clear_non_finite(total, values)
        all_values, all_indices = collectives.all_gather(values), collectives.all_gather(indices)
        mean = torch.zeros_like(total)
        with collectives.stats.decoding():
            for sender, message in enumerate(zip(all_values, all_indices, strict=True)):
                with with_sender(sender):
                    innovation.decompress(message, state.layout, mean, accumulate=True)
        return mean.div_(collectives.size)

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__} must be used by mean_, got a single message, which only ranks "
            "that train the same auto-encoder can decode"
        )


def _checked(indices: Tensor, numel: int) -> Tensor:
    """Return indices that the CPU has checked; a GPU counts those out of range, and clamps them."""
    if not indices.is_cpu:
        with only_counting():
            counter = corrupt_counter(None, indices)
        counter.add_(((indices < 0) | (indices >= numel)).sum())
        return indices.clamp(0, numel - 1)
    ascending = indices.sort().values
    if ascending[0] < 0 or ascending[-1] >= numel or not (ascending.diff() > 0).all():
        raise CorruptMessageError(
            f"shared indices must be distinct and in [0, {numel}), got {len(indices)} from "
            f"{ascending[0]} to {ascending[-1]}"
        )
    return indices
