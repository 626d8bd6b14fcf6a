"""Headers of gossip messages, by which a rank checks a message before it is used.

A header is one row of 8 float64, sent beside each message: the push-sum mass, the trainer's number,
the round, the length of the message in bytes (negative for a difference to an earlier one), the
sender's counts (`StepCounts`), and how many entries of its last gradient were not finite.
"""

import math
import warnings
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._corrupt import CorruptCounter
from .collectives import Collectives
from .errors import NonFiniteError, PeerError, place_of, trainer_of, trainer_to_name
from .step_hook import StepCounts

MASS, TRAINER, ROUND, LENGTH, STEPS, REPEATS, FORWARDS, NONFINITE = range(8)
NUM_FIELDS = 8
ANY = -1  # of a round or a count: not compared

# Of regular topologies, where masses are the senders' shares. Shares that are multiples of 2**-40
# add up without rounding; those of a user's own topology may drift by 2**-53 in each addition,
# which takes more than 10**9 rounds to get here.
_TOLERANCE = 1e-6
# Of what one counter on a device counts at once.
_NONFINITE_UNIT, _FORWARDS_UNIT = 1 << 21, 1 << 42
_NUM_RECENT = 8

_MUST_BE_EQUAL = {
    TRAINER: ("of the same trainer", "step all trainers in the same order on all ranks"),
    ROUND: ("of the same round", "load checkpoints of one step on all ranks"),
    LENGTH: (
        "as long as the receiver expects, in bytes",
        "wrap equal models, and load the same state on all ranks (negative: a difference to an "
        "earlier message, which a rank without that state cannot read)",
    ),
    STEPS: (
        "sent after as many optimizer steps",
        "step alike on all ranks, also inside no_sync(), or use join() for unequal numbers of "
        "batches",
    ),
    REPEATS: (
        "sent after as many steps without a training forward since the step before",
        "call optimizer.step() once after each forward and backward",
    ),
}


class _Expected(NamedTuple):
    """What the received messages of a round must be."""

    own: Sequence[float]
    lengths: Sequence[int]
    senders: Sequence[int]
    masses: Sequence[float]


class MessageHeaders:
    """Write the headers of a rank's messages, and check those that it receives.

    On the CPU an invalid header is an error before anything of its message is used. On other
    devices, which the host does not wait for, the message gets the mass 0, which leaves it out of
    the average, and is counted; a later call raises.

    Args:
        rank: in the group.
        num_ranks: of the group: no mass exceeds it.
        process_group: of the trainer; None: the default group.

    Attributes:
        counts: the trainer's; it writes them.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.counts = StepCounts()
        self._rank, self._num_ranks, self._group = rank, num_ranks, process_group
        self._trainer = trainer_of(process_group) or 0
        self._nonfinite_senders: dict[int, float] = {}
        self._has_warned = False
        self._counter: CorruptCounter | None = None  # on devices other than the CPU
        self._recent: deque[tuple[_Expected, Tensor]] = deque(maxlen=_NUM_RECENT)

    def of_round(
        self,
        round_index: int,
        masses: Tensor,
        length: int,
        senders: Sequence[int],
        lengths: Sequence[int] | None = None,
        masses_in: Sequence[float] = (),
    ) -> "RoundHeaders":
        """Return the headers of a round of one buffer.

        Args:
            round_index: the round; ``ANY``: the receiver does not know it.
            masses: (k,) float64, of the messages to send.
            length: of the messages to send, in bytes.
            senders: the ranks of which a message is received.
            lengths: of the messages to receive; None: ``length`` for all.
            masses_in: of the messages to receive; empty: any that can be.

        Raises:
            PeerError: on a device, an earlier message was not what it must be.
        """
        own = [self._trainer, round_index, length, *self._own_counts()]
        expected = _Expected(own, lengths or [length] * len(senders), senders, masses_in)
        if masses.device.type != "cpu":
            self._raise_counted(masses.device)
        return RoundHeaders(self, expected, masses, self.counts.nonfinite)

    def gather(self, collectives: Collectives, round_index: int, device: torch.device) -> None:
        """Compare this rank's header with those of all ranks, before they average exactly.

        On devices other than the CPU an invalid header is counted, and a later call raises.

        Args:
            collectives: of the ranks that average.
            round_index: of the average; ``ANY``: not compared.
            device: of the parameters.

        Raises:
            PeerError: headers differ: on the CPU the same pair on all ranks.
        """
        if device.type != "cpu":
            self._raise_counted(device)
        row = self.row(round_index, device)
        with collectives.uncounted():
            rows = collectives.all_gather(row)
        if device.type == "cpu":
            self.check_gathered(rows.tolist())
            return
        own = [self._trainer, round_index, 0, *self._own_counts()]
        expected = _Expected(own, [0] * len(rows), range(len(rows)), (1.0,) * len(rows))
        self.screen(expected, rows, row)

    def row(self, round_index: int, device: torch.device) -> Tensor:
        """Return this rank's header of an exact average, (8,) float64 on the device."""
        own = [self._trainer, round_index, 0, *self._own_counts()]
        return _row(1.0, own, self.counts.nonfinite, device)

    def check_gathered(self, rows: Sequence[Sequence[float]]) -> None:
        """Compare the headers of all ranks on the host.

        Raises:
            PeerError: two differ; names the same two ranks on all.
        """
        first = next((rank for rank, row in enumerate(rows) if row[STEPS] != ANY), 0)
        for rank, row in enumerate(rows):
            subject = f"the parameters that rank {self._global_rank(rank)} averages"
            self._compare(subject, (first, rank), row, rows[first][TRAINER:NONFINITE])
            if row[NONFINITE] and rank != self._rank:
                self._nonfinite_senders[rank] = row[NONFINITE]

    def raise_nonfinite(self) -> None:
        """Raise if a message received since the last call came with a gradient of nan or inf.

        Raises:
            NonFiniteError: names the senders; only if ``nonfinite`` is "raise". The round in which
                they were received is complete.
        """
        senders, self._nonfinite_senders = self._nonfinite_senders, {}
        if senders and self.counts.policy == "raise":
            counted = ", ".join(
                f"{int(number)} entries that are nan or inf on rank {self._global_rank(sender)}"
                for sender, number in senders.items()
            )
            raise NonFiniteError(
                f"{self.place(self.counts.steps)}: gradients must be finite, got {counted}"
            )

    def place(self, step: int | None) -> str:
        """Return the beginning of an error's text."""
        return place_of(self._global_rank(self._rank), step, trainer_to_name(self._group))

    def check_rows(self, expected: _Expected, rows: Sequence[Sequence[float]]) -> None:
        """Check the received rows on the host.

        Raises:
            PeerError: one is not what it must be; names both ranks and both values.
        """
        masses: Sequence[float | None] = expected.masses or [None] * len(rows)
        for sender, row, length, mass in zip(
            expected.senders, rows, expected.lengths, masses, strict=True
        ):
            own = expected.own
            if length != own[2]:
                own = [*own[:2], length, *own[3:]]
            if row[TRAINER:NONFINITE] != own:
                me, there = self._global_rank(self._rank), self._global_rank(sender)
                edge = f"the message on edge {there} -> {me}"
                self._compare(edge, (self._rank, sender), row, own)
            self._check_mass(sender, row[MASS], mass, own)
            if row[NONFINITE]:
                self._nonfinite_senders[sender] = row[NONFINITE]

    def screen(self, expected: _Expected, rows: Tensor, own: Tensor) -> Tensor:
        """Check the received rows on their device, which the host does not wait for.

        Args:
            expected: what they must be.
            rows: (k, 8) received.
            own: (8,) of this rank, on the device.

        Returns:
            The masses, (k,): 0 for messages that are not what they must be.
        """
        counter = self._counter_on(rows.device)
        self._recent.append((expected, rows))
        wanted = own.expand_as(rows)
        if any(length != expected.own[2] for length in expected.lengths):
            wanted = wanted.clone()
            wanted[:, LENGTH] = to_device(expected.lengths, rows.device)
        compared = slice(TRAINER, FORWARDS + 1)
        theirs, ours = rows[:, compared], wanted[:, compared]
        differs = (theirs != ours) & (theirs != ANY) & (ours != ANY)
        low, high = self._mass_bounds(expected, rows.device)
        mass = rows[:, MASS]
        fits = ~differs[:, :-1].any(1) & (mass > low) & (mass <= high)
        found = (~fits).to(torch.int64)
        found += (rows[:, NONFINITE] != 0) * _NONFINITE_UNIT
        found += differs[:, -1] * _FORWARDS_UNIT
        counter.tensor.add_(found.sum())
        return torch.where(fits, mass, torch.zeros_like(mass))

    def _global_rank(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _own_counts(self) -> tuple[int, int, int]:
        counts = self.counts
        return counts.steps, counts.repeats, counts.forwards

    def _compare(
        self,
        subject: str,
        ranks: tuple[int, int],
        row: Sequence[float],
        own: Sequence[float],
    ) -> None:
        """Compare the header of the second rank with what the first expects."""
        here, there = (self._global_rank(rank) for rank in ranks)
        for field, theirs, ours in zip(range(TRAINER, NONFINITE), row[TRAINER:], own, strict=False):
            if theirs == ours or (field != LENGTH and ANY in (theirs, ours)):
                continue
            values = f"{int(ours)} on rank {here} and {_number(theirs)} on rank {there}"
            if field == FORWARDS:
                self._warn_of_forwards(values)
                continue
            rule, fix = _MUST_BE_EQUAL[field]
            raise PeerError(
                f"{self._place_of_round(own)}: {subject} must be {rule}, got {values}: {fix}"
            )

    def _check_mass(
        self, sender: int, mass: float, share: float | None, own: Sequence[float]
    ) -> None:
        if share is None:
            fits, rule = 0 < mass <= self._num_ranks, f"in (0, {self._num_ranks}]"
        else:
            fits, rule = abs(mass - share) <= _TOLERANCE * share, f"its share {share}"
        if not fits:
            ranks = self._global_rank(sender), self._global_rank(self._rank)
            raise PeerError(
                f"{self._place_of_round(own)}: the mass of the message on edge {ranks[0]} -> "
                f"{ranks[1]} must be {rule}, got {mass} from rank {ranks[0]}: load a valid state "
                "on that rank"
            )

    def _place_of_round(self, own: Sequence[float]) -> str:
        return self.place(None if own[1] == ANY else int(own[1]))

    def _warn_of_forwards(self, values: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.place(None)}: the ranks have run unequal numbers of training forwards, "
                f"{values}: expected if they accumulate gradients over unequal numbers of batches; "
                "otherwise one of them has skipped a batch, after which ranks no longer step alike",
                stacklevel=2,
            )

    def _mass_bounds(
        self, expected: _Expected, device: torch.device
    ) -> tuple[float | Tensor, float | Tensor]:
        if not expected.masses:
            return 0.0, float(self._num_ranks)
        masses = to_device(expected.masses, device)
        return masses * (1 - _TOLERANCE), masses * (1 + _TOLERANCE)

    def _counter_on(self, device: torch.device) -> CorruptCounter:
        if self._counter is None:
            self._counter = CorruptCounter(device)
        return self._counter

    def _raise_counted(self, device: torch.device) -> None:
        """Raise for messages that an earlier round has counted; waits for nothing without any."""
        count = self._counter_on(device).num_unreported()
        if not count:
            return
        num_left_out = count % _NONFINITE_UNIT
        num_nonfinite = count % _FORWARDS_UNIT // _NONFINITE_UNIT
        recent, self._recent = list(self._recent), deque(maxlen=_NUM_RECENT)
        for expected, rows in recent:  # names ranks and values; also warns
            self.check_rows(expected, rows.tolist())
        if num_left_out:
            raise PeerError(
                f"{self.place(None)}: messages must have the header that this rank expects, got "
                f"{num_left_out} with another one, which were left out: ranks no longer agree; "
                "stop the run and load a checkpoint"
            )
        if num_nonfinite:
            self.raise_nonfinite()


class RoundHeaders:
    """The headers of one buffer's messages in a round.

    Attributes:
        sent: (k, 8) float64, to be sent with the messages.
        received: (m, 8) float64, to be received with the messages.
    """

    def __init__(
        self,
        headers: MessageHeaders,
        expected: _Expected,
        masses: Tensor,
        nonfinite: float | Tensor,
    ) -> None:
        self._headers, self._expected = headers, expected
        self.received = masses.new_empty(len(expected.senders), NUM_FIELDS)
        self._own = _row(0.0, expected.own, nonfinite, masses.device)
        columns = self._own[TRAINER:].expand(masses.shape[0], -1)
        self.sent = torch.cat([masses.view(-1, 1), columns], dim=1)

    @property
    def round_index(self) -> int:
        """The round in the header received from the first sender, which has arrived."""
        return int(self.received[0, ROUND])

    def check(self) -> Tensor:
        """Return the received masses, (m,), after a check of the headers, which have arrived.

        Raises:
            PeerError: on the CPU, a header is not what it must be.
        """
        if self.received.device.type != "cpu":
            return self._headers.screen(self._expected, self.received, self._own)
        self._headers.check_rows(self._expected, self.received.tolist())
        return self.received[:, MASS].contiguous()


def _row(
    mass: float, own: Sequence[float], nonfinite: float | Tensor, device: torch.device
) -> Tensor:
    """Return a header, (8,) float64 on the device."""
    if not isinstance(nonfinite, Tensor) or nonfinite.is_cpu:
        return to_device([mass, *own, float(nonfinite)], device)
    row = to_device([mass, *own, 0.0], device)
    row[NONFINITE] = nonfinite
    return row


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers as (n,) float64; the host does not wait for the device."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    pinned = torch.tensor(numbers, dtype=torch.float64, pin_memory=True)
    return pinned.to(device, non_blocking=True)


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)
