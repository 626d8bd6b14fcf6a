"""Stochastic Gradient Push: a local step on the numerator, then a round of PushSum."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..comm import Exchange, FlatBuckets
from .averaging import PushSum
from .topology import Topology


@dataclass(frozen=True)
class SGP:
    """Stochastic Gradient Push (Assran et al., ICML 2019, arXiv 1811.10792), Algorithm 1.

    Each step every rank updates its own model with its own optimizer, then sends it to the
    topology's out-neighbors and averages it with what arrives. Momentum buffers stay local.

    Args:
        topology: who averages with whom, for as many ranks as the process group has.
    """

    topology: Topology

    def facts(self) -> list[tuple[str, str]]:
        """The topology by name, then by its edges: a user's own class may share a name."""
        return [("algorithm", repr(self)), ("topology", self.topology.fingerprint())]

    def problem(self, num_ranks: int) -> str | None:
        """A topology for another number of ranks, or one that does not validate."""
        if self.topology.num_ranks != num_ranks:
            return (
                f"topology must be for the process group's {num_ranks} ranks, got {self.topology!r}"
            )
        try:
            self.topology.validate()
        except ValueError as error:
            return str(error)
        return None

    def start(
        self, module: nn.Module, buckets: FlatBuckets, process_group: dist.ProcessGroup | None
    ) -> "SGPSession":
        """Begin with mass 1 on every rank.

        Raises:
            ValueError: 16-bit parameters where the optimizer must step on the numerator: scaling
                them by the mass and back would round away small updates, and overflow in fp16.
        """
        low = {buffer.dtype for buffer in buckets.buffers} - {torch.float32}
        if low and not self.topology.regular:
            raise ValueError(
                "parameters must be float32 on a topology that is not regular, got "
                f"{', '.join(sorted(map(str, low)))} with {self.topology!r}"
            )
        averaging = PushSum(buckets.buffers, Exchange(process_group), self.topology)
        return SGPSession(module, averaging)


class SGPSession(Joinable):
    """SGP on one rank; the round is complete when ``optimizer.step()`` returns."""

    def __init__(self, module: nn.Module, averaging: PushSum) -> None:
        super().__init__()
        self._module = module
        self._averaging = averaging
        self._postponed = False

    @property
    def weight(self) -> Tensor:
        """The rank's mass: exactly 1 on regular topologies."""
        return self._averaging.weight

    @property
    def bytes_sent(self) -> int:
        """Parameters and masses sent to neighbors so far."""
        return self._averaging.exchange.bytes_sent

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module as it is: what it holds are the de-biased parameters."""
        self.settle()
        return self._module(*inputs, **kwargs)

    def settle(self) -> None:
        """De-bias what an exception inside the optimizer's step has left as the numerator."""
        self._averaging.to_debiased()

    def before_step(self, *, has_closure: bool) -> None:
        """Let the optimizer find the numerator, as the paper's update rule wants."""
        if has_closure and not self._averaging.topology.regular:
            raise ValueError(
                "closure must be None on a topology that is not regular: the optimizer steps on "
                "the numerator, where the closure would compute a wrong loss"
            )
        self.settle()
        self._averaging.to_numerator()

    def after_step(self) -> None:
        """De-bias, then take the round."""
        self._averaging.to_debiased()
        if not self._postponed:
            self._notify_joined_ranks()
            self._averaging.mix()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the rounds of steps inside to the first step outside."""
        before, self._postponed = self._postponed, True
        try:
            yield
        finally:
            self._postponed = before

    def close(self) -> None:
        """Nothing: the exchange holds the group in Python alone."""

    @property
    def joinable(self) -> Joinable:
        """The session itself: a rank without batches goes on taking rounds."""
        return self

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Shadow the rounds of the ranks that still train."""
        return _TakeRounds(self._averaging)

    @property
    def join_device(self) -> torch.device:
        """Where the parameters are."""
        return self.weight.device

    @property
    def join_process_group(self) -> Any:
        """The group that gossips."""
        return self._averaging.exchange.process_group or dist.group.WORLD

    def _notify_joined_ranks(self) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()


class _TakeRounds(JoinHook):
    def __init__(self, averaging: PushSum) -> None:
        self._averaging = averaging

    def main_hook(self) -> None:
        self._averaging.mix()
