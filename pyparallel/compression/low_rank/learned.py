"""Entries at indices that all ranks share, averaged by codes which an auto-encoder has learnt."""

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ... import ops
from ...comm.collectives import Collectives
from ..compressor import AttachPoint, Compressor, Message, check_buffer
from ..layout import BufferLayout
from ..residual import clear_non_finite
from ..sparsifiers.top_k import TopK, check_density, count_of
from ..state import CompressorState
from ..validation import CorruptMessageError, naming_the_sender
from .auto_encoder import (
    AutoEncoder,
    ConvAutoEncoder,
    decode_mean,
    train_step_,
    init_training_state,
)


@dataclass(frozen=True)
class Learned(Compressor):
    """Learned Gradient Compression over all-reduce (Abrahamyan et al., 2021, arXiv 2103.08870).

    Gradients of ranks have much in common, which a light auto-encoder learns to say. Three phases:
    first all ranks average everything; then, while the auto-encoder learns, the entries that one
    rank chose (its largest; ranks take turns); then codes of these entries, of which the mean is
    decoded. From the second phase on each rank also sends its innovation: the largest entries,
    anywhere, of what that lost. As it is, the rest is lost: use ``ErrorFeedback(Learned(...))``.

    The indices travel in the order of the chooser's values, since only neighbors that are alike can
    be said by a code shorter than they. The paper sends them ascending, and has the innovation in
    its parameter-server form alone.

    On the way, of k entries at shared indices and a codes' length c (k / 4 by default), in bytes:
    4 k of indices, 8 each of innovations to every rank, and 4 k all-reduced in the second phase, to
    which learning adds 4 c and 4 for each of its weights (21008 by default); 4 c in the third.
    Codes stay float32, for shares in a rounded mean would not add up to it. Learning takes a
    forward and a backward pass through the auto-encoder a step; the third phase a forward pass, and
    two backward ones through the decoder. Each buffer (a bucket of DDP) has an auto-encoder of its
    own, with 8 bytes a weight; ``state.common["loss"]`` is its last loss, which is below 1 if
    anything was learnt.

    It averages over ranks and does nothing else, so it serves DDP alone. All ranks decode for
    themselves, so their devices must be of one kind. Codes of small parameters save nothing:
    ``PerParameter`` leaves them, and the first and last layers as in the paper, to others.

    Args:
        density: the share of a buffer's entries at the shared indices, in (0, 1].
        dense_steps: of the first phase.
        learning_steps: of the second.
        innovation: the share of a buffer's entries that each rank adds, in (0, 1]; at least one
            entry, so that a nan or an inf is always seen.
        learning_rate: of the auto-encoder's SGD.
        auto_encoder: of the codes.
    """

    density: float = 0.001
    dense_steps: int = 200
    learning_steps: int = 300
    innovation: float = 0.00001
    learning_rate: float = 0.01
    auto_encoder: AutoEncoder = ConvAutoEncoder()  # noqa: RUF009 (it is immutable)

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0 < self.innovation <= 1:
            raise ValueError(f"innovation must be in (0, 1], got {self.innovation!r}")
        if min(self.dense_steps, self.learning_steps) < 0:
            raise ValueError(
                "dense_steps and learning_steps must be >= 0, got "
                f"{self.dense_steps} and {self.learning_steps}"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be > 0, got {self.learning_rate!r}")

    @property
    def unbiased(self) -> bool:
        """No."""
        return False

    @property
    def fixed_length(self) -> bool:
        """No: it depends on the phase."""
        return False

    def validation_error(self, place: AttachPoint) -> str | None:
        """Whatever is no mean over all ranks of the same entries."""
        if place is AttachPoint.DDP:
            return None
        return (
            f"compressor must serve messages between ranks where it serves {place.value}, got "
            f"{self}, which averages over all ranks; use ErrorFeedback(TopK({self.density!r}))"
        )

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """With the auto-encoder's first weights and a guess of the smallest entry chosen."""
        threshold = torch.zeros((), dtype=torch.float32, device=device)
        common = init_training_state(self.auto_encoder, device)
        return CompressorState(layout, rank, common=common, hints={"threshold": threshold})

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Refuse: see `mean_`."""
        self._refuse()

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """Refuse: see `mean_`."""
        self._refuse()

    def mean_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Tensor | None = None,
    ) -> None:
        """As `Compressor.mean_`."""
        check_buffer(x, state.layout)
        step, state.step = state.step, state.step + 1
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
        """The mean of what is sent; ``total`` becomes what is not."""
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
        """Of the chooser's largest entries, in the order of their values: (k,) int64."""
        count = count_of(self.density, total.numel())
        if collectives.rank == source:
            with collectives.stats.encoding():
                values, ascending = ops.top_k(total, count, threshold=state.hints["threshold"])
                indices = ascending[values.argsort()]
        else:
            dtype = torch.int32 if total.numel() < 2**31 else torch.int64
            indices = torch.empty(count, dtype=dtype, device=total.device)
        collectives.broadcast_(indices, source)
        with naming_the_sender(source):
            _check_indices(indices, total.numel())
        return indices.long()

    def _learn(
        self, values: Tensor, state: CompressorState, collectives: Collectives
    ) -> tuple[Tensor, Tensor]:
        """The mean of the values, and this rank's share in it: its values."""
        mean = values.clone()
        collectives.all_reduce_(mean)
        mean.div_(collectives.size)
        train_step_(self.auto_encoder, state.common, values, mean, collectives, self.learning_rate)
        return mean, values

    def _average_codes(
        self, values: Tensor, state: CompressorState, collectives: Collectives
    ) -> tuple[Tensor, Tensor]:
        """What the mean of the values' codes decodes to, and this rank's share in it."""
        weights = state.common["weights"]
        with collectives.stats.encoding():
            code = self.auto_encoder.encode(weights, values)
        mean_code = code.clone()
        collectives.all_reduce_(mean_code)
        mean_code.div_(collectives.size)
        with collectives.stats.decoding():
            return decode_mean(self.auto_encoder, weights, code, mean_code, values.numel())

    def _innovate(self, total: Tensor, state: CompressorState, collectives: Collectives) -> Tensor:
        """The mean of all ranks' innovations, which leave 0 behind in ``total``."""
        innovation = TopK(self.innovation)
        with collectives.stats.encoding():
            values, indices = ops.top_k(total, count_of(self.innovation, total.numel()))
            total.index_fill_(0, indices.long(), 0)
            clear_non_finite(total, values)
        all_values, all_indices = collectives.all_gather(values), collectives.all_gather(indices)
        mean = torch.zeros_like(total)
        with collectives.stats.decoding():
            for sender, message in enumerate(zip(all_values, all_indices, strict=True)):
                with naming_the_sender(sender):
                    innovation.decompress(message, state.layout, mean, accumulate=True)
        return mean.div_(collectives.size)

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__} must be asked for means over ranks (mean_), got a single "
            "message, which nobody could read who does not learn with its sender"
        )


def _check_indices(indices: Tensor, numel: int) -> None:
    """On the CPU; elsewhere an index out of range stops the device."""
    if indices.device.type == "cpu":
        ascending = indices.sort().values
        if ascending[0] < 0 or ascending[-1] >= numel or not (ascending.diff() > 0).all():
            raise CorruptMessageError(
                f"shared indices must be different ones in [0, {numel}), got {len(indices)} from "
                f"{ascending[0]} to {ascending[-1]}"
            )
