"""Overlap SGP: gradients are computed while messages are in flight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...compression import BufferLayout
from ...training import FlatBuckets
from ...training.arguments import is_integer, require
from ...training.step_hook import decays_only
from ..messages import NeighborExchange
from ..push_sum.delayed import DelayedPushSum
from ..push_sum.dense_buffer import BiasedBuffer, DenseBuffer
from .base import OnTopology


def osgp(
    k: int,
    x: Tensor,
    w: Tensor,
    sent: dict[int, tuple[Tensor, Tensor]],
    update: Callable[[Tensor, Tensor], Tensor],
    mixing: Tensor,
    tau: int,
    *,
    biased: bool = False,
) -> tuple[Tensor, Tensor]:
    """Take step k of Algorithm 2 of Assran et al. on all n ranks; return x and w after it.

    Args:
        k: the step, from 0.
        x: (n, d) numerators, a row for each rank.
        w: (n, 1) push-sum weights.
        sent: messages and masses in flight by the step in which they were sent. Written.
        update: of all ranks' optimizers, (n, d), of the gradients at its first argument, and of its
            second, the parameters that they step on: with SGD, lr * gradient.
        mixing: (n, n) P of the round; p_ij is the share that j sends to i.
        biased: the paper's ablation, which leaves out w.
    """
    z = x if biased else x / w  # z_i = x_i / w_i
    x = x - update(z, x)  # x_i <- x_i - lr * grad F_i(z_i)
    if k % tau == 0:
        kept = mixing.diag().diag()
        sent[k] = (mixing - kept) @ x, (mixing - kept) @ w  # send p_ji x_i and p_ji w_i to each j
        x, w = kept @ x, kept @ w  # x_i <- p_ii x_i and w_i <- p_ii w_i
    if k - tau in sent:
        received = sent.pop(k - tau)  # block until these messages have arrived
        x, w = x + received[0], w + received[1]  # x_i += sum_j p_ij x_j and w_i += sum_j p_ij w_j
    return x, w


@dataclass(frozen=True)
class OSGP(OnTopology):
    """Overlap SGP (Assran et al., ICML 2019, arXiv 1811.10792), Algorithm 2.

    In step k, counted from 0, the optimizer updates the numerator x with the gradient at z = x / w.
    If k is a multiple of ``delay``, the rank then sends shares of x and w to the out-neighbors of
    the topology's next round, keeps the rest, and adds the messages that were sent ``delay`` steps
    before. So messages are in flight during ``delay`` forward and backward passes, and their mass
    is missing from w: on regular topologies with one peer w goes to 2/3, and the optimizer's steps
    on z are lr / w.

    ``SGP(topology, overlap=delay)`` merges just before the next update instead of after it. The two
    orders differ in accuracy and in which learning rates are stable: see ``stability_limit``.

    Memory: two copies of the parameters and one more for each further in-neighbor.

    Args:
        topology: as of SGP.
        delay: number of steps for which messages are in flight, tau of the paper, at least 1.
        biased: leave out the push-sum weight, as the paper's ablation does: gradients are computed
            at x, and ``push_sum_weight`` is 1. Only for comparisons.
    """

    merges_after_update = True  # SGP merges before it
    compressor = None
    delay: int = 1
    biased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "SGP(topology) averages without a delay"
        rule = "delay must be a number of steps, at least 1"
        require(is_integer(self.delay), rule, self.delay, fix)
        if not isinstance(self.biased, bool):
            raise TypeError(f"biased must be True or False, got {self.biased!r}")

    @property
    def overlap(self) -> int:
        """Return the delay, by the name that it has in SGP."""
        return self.delay

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> DelayedPushSum:
        # Scaling by the weight would round away small updates of 16-bit ones, and overflow in fp16.
        low = {buffer.dtype for buffer in buckets.buffers} - {torch.float32, torch.float64}
        rule = "parameters must be float32 or float64 for OSGP, whose push-sum weights differ"
        fix = "SGP(topology, overlap=1) takes 16-bit ones on regular topologies"
        require(not low, rule, ", ".join(sorted(map(str, low))), fix)
        given = module, buckets, run, self.bound_topology, self.delay
        return DelayedPushSum.start(
            self._make_buffer, *given, keeps_values=not decays_only(optimizer)
        )

    def _make_buffer(
        self, values: Tensor, exchange: NeighborExchange, layout: BufferLayout
    ) -> DenseBuffer:
        if self.biased:
            return BiasedBuffer(values, exchange)
        return DenseBuffer(values, exchange, snapshot=True)
