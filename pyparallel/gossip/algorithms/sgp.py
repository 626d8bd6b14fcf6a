"""Stochastic Gradient Push: a local step on the numerator, and a PushSum round."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...compression import AttachPoint, BufferLayout, Compressor
from ...compression.compressor import not_a_compressor
from ...training import FlatBuckets, Place
from ...training.arguments import check_integer, check_one_of, raise_problem
from ...training.step_hook import decays_only
from ..messages import NeighborExchange, SymmetricMemoryExchange
from ..push_sum.buffer import RoundBuffer
from ..push_sum.compressed_buffer import CompressedBuffer
from ..push_sum.dense_buffer import DenseBuffer
from ..push_sum.push_sum import PushSum
from .base import TRANSPORT, OnTopology

Update = Callable[[Tensor], Tensor]
"""What the optimizers subtract, (n, d), of the gradients at z, (n, d): with SGD, lr * gradient."""

InFlight = tuple[Tensor, Tensor] | None
"""Messages, (n, d), and their masses, (n, 1), by the rank that receives them."""


def sgp(x: Tensor, w: Tensor, update: Update, mixing: Tensor) -> tuple[Tensor, Tensor]:
    """Take a step of Algorithm 1 of Assran et al. on all n ranks; return x and w after it.

    Args:
        x: (n, d) numerators, a row for each rank.
        w: (n, 1) push-sum weights.
        update: of all ranks' optimizers.
        mixing: (n, n) P, whose columns sum to 1; p_ij is the share that j sends to i.
    """
    z = x / w  # z_i = x_i / w_i, at which gradients are computed
    x = x - update(z)  # x_i <- x_i - lr * grad F_i(z_i)
    return mixing @ x, mixing @ w  # x_i <- sum_j p_ij x_j and w_i <- sum_j p_ij w_j


def combine_while_adapt(
    x: Tensor,
    w: Tensor,
    in_flight: InFlight,
    update: Update,
    mixing: Tensor | None,
    *,
    merges: bool,
) -> tuple[Tensor, Tensor, InFlight]:
    """Take a step of SGP with ``overlap`` on all n ranks; return x, w and messages after it.

    Args:
        in_flight: messages sent after an earlier update.
        mixing: (n, n) P; None: no round is sent after this update.
        merges: the messages in flight are due in this step.
    """
    z = x / w  # the gradient is computed while messages are in flight
    if merges and in_flight is not None:
        x, w, in_flight = x + in_flight[0], w + in_flight[1], None
    x = x - update(z)
    if mixing is not None:
        kept = mixing.diag().diag()  # p_ii
        in_flight = (mixing - kept) @ x, (mixing - kept) @ w  # p_ij x_j and p_ij w_j, i != j
        x, w = kept @ x, kept @ w
    return x, w, in_flight


@dataclass(frozen=True)
class SGP(OnTopology):
    """Stochastic Gradient Push (Assran et al., ICML 2019, arXiv 1811.10792), Algorithm 1.

    In each step every rank updates its own model with its own optimizer, then sends it to the
    topology's out-neighbors and averages it with the received messages. Optimizer state such as
    momentum stays local.

    ``overlap=0`` is adapt-then-combine: the update, then the average, complete when
    ``optimizer.step()`` returns. ``overlap=tau`` is combine-while-adapt: the message of a step is
    in flight during the next tau forward and backward passes and merged just before the update that
    follows, whose gradient was computed before the merge: ``z <- P z - lr * g(z)``. The paper's
    Overlap SGP has another order, `OSGP`. Which learning rates are stable depends on the order: see
    ``stability_limit``.

    With ``overlap=1`` no copy is made, and on regular topologies the push-sum weight is 1 at every
    update. With ``overlap=tau > 1`` a message is sent every tau steps, from a copy. Updates in
    between act on the numerator that the rank has kept, so their effective learning rate is lr / w
    with w < 1 (twice lr for one peer).

    In a round in which every rank sends equal shares to all others (`Complete`, also in a phase),
    uncompressed float32 parameters are added by an all-reduce, which sends fewer bytes.

    Args:
        topology: the neighbors of each round, or its class; None: ``OnePeerExponential`` where the
            number of ranks is a power of two, else ``BaseGraph``.
        overlap: tau, the number of steps for which messages may be in flight.
        compressor: of the messages; None: parameters are sent uncompressed. It compresses deltas
            against the receivers' copy (CHOCO-SGD, see `CompressedBuffer`), so it needs no error
            feedback and ranks still reach consensus. An aggressive one needs smaller shares: use
            ``Lazy``, which lists suitable factors. Memory: as many copies of the parameters as
            `Replicas` documents.
        transport: "process_group", or "symmetric_memory" between the GPUs of one node, where
            receivers copy messages out of the sender's memory without NCCL's kernels; it was tried
            on one GPU that two ranks shared. Memory: one more copy of the parameters at most.
            Results are the same, and a run may resume with the other one.
    """

    merges_after_update = biased = False
    overlap: int = 0
    compressor: Compressor | None = None
    transport: str = field(default="process_group", repr=False)  # the repr is part of states

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("overlap", self.overlap, 0, "a number of steps, at least 0")
        raise_problem(not_a_compressor(self.compressor, optional=True))
        check_one_of("transport", self.transport, ("process_group", "symmetric_memory"))

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        return [*super().config_fields(), (TRANSPORT, self.transport)]

    @property
    @override
    def can_have_members(self) -> bool:
        return self.transport == "process_group"

    @override
    def error_at(self, place: Place) -> str | None:
        if (error_text := super().error_at(place)) or self.compressor is None:
            return error_text
        return self.compressor.error_at(AttachPoint.GOSSIP)

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> PushSum:
        # Scaling by the weight would round away small updates of 16-bit ones, and overflow in fp16.
        low = {buffer.dtype for buffer in buckets.buffers} - {torch.float32, torch.float64}
        if low and not (self.bound_topology.regular and self.overlap <= 1):
            raise ValueError(
                "parameters must be float32 or float64 if push-sum weights differ (on a topology "
                "that is not regular, or with overlap > 1), got "
                f"{', '.join(sorted(map(str, low)))} with {self}"
            )
        given = module, buckets, run, self.bound_topology, self.overlap
        return PushSum.start(self.make_buffer, *given, keeps_values=not decays_only(optimizer))

    def make_buffer(
        self,
        values: Tensor,
        exchange: NeighborExchange,
        layout: BufferLayout,
        *,
        is_acknowledged: bool = False,
    ) -> RoundBuffer:
        """Return a buffer of z; what it sends stays sent, and is kept, ``is_acknowledged``."""
        if self.transport == "symmetric_memory":
            exchange = SymmetricMemoryExchange(exchange)
        takes_back = not is_acknowledged
        if self.compressor is None:
            snapshot = self.overlap > 1 or is_acknowledged
            return DenseBuffer(values, exchange, snapshot=snapshot, takes_back=takes_back)
        options = self.bound_topology, self.compressor, layout
        return CompressedBuffer(values, exchange, *options, takes_back=takes_back)
