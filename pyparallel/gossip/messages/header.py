"""Headers of gossip messages, by which a rank checks a message before it is used.

A header is one row of 8 float64, sent beside each message: the push-sum mass, the trainer's number,
the round, the message's bytes, the sender's counts (`StepCounts`), and how many entries of its last
gradient were not finite. A message that is a difference to an earlier one has negative bytes.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import counts
from ...comm.collectives import Collectives
from ...comm.errors import NonFiniteError, PeerError
from ...comm.run import Run
from ...ops import screen_headers
from ...ops._corrupt import CorruptCounter
from ...ops.mix import FORWARDS_UNIT, NONFINITE_UNIT

# Of regular topologies, where masses are the senders' shares. Shares that are multiples of 2**-40
# add up without rounding; those of a user's own topology may drift by 2**-53 in each addition,
# which takes more than 10**9 rounds to get here.
_TOLERANCE = 1e-6
_NUM_RECENT = 8


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

    Without counts in headers, ranks may step at their own pace.
    """

    def __init__(self, run: Run, *, has_counts: bool = True) -> None:
        self.run, self._has_counts = run, has_counts
        self._nonfinite_senders: dict[int, float] = {}
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
        """Return the headers of a round of one buffer; arguments are those of ``swap``.

        ``lengths`` of the messages to receive, in bytes, are ``length`` if None. Raises a PeerError
        if on a device an earlier message was not what it must be.
        """
        own = self.run.fields(round_index, length, has_counts=self._has_counts)
        expected = _Expected(own, lengths or [length] * len(senders), senders, masses_in)
        if masses.device.type != "cpu":
            self._raise_counted(masses.device)
        own_row = counts.make_row(0.0, own, self.run.counts.nonfinite, masses.device)
        columns = own_row[counts.TRAINER :].expand(masses.shape[0], -1)
        sent = torch.cat([masses.view(-1, 1), columns], dim=1)
        received = masses.new_empty(len(senders), counts.NUM_FIELDS)
        return RoundHeaders(self, expected, sent, received)

    def gather(
        self,
        collectives: Collectives,
        round_index: int,
        device: torch.device,
        row: Tensor | None = None,
    ) -> None:
        """Compare this rank's header with those of all ranks, before they average exactly.

        ``row`` is ``Run.row`` of when the average began, if that is not now.

        On the CPU headers that differ are a PeerError, of the same pair on all ranks. On other
        devices an invalid header is counted, and a later call raises.
        """
        if device.type != "cpu":
            self._raise_counted(device)
        row = self.run.row(device, round_index) if row is None else row
        with collectives.uncounted():
            rows = collectives.all_gather(row)
        if device.type == "cpu":
            self.check_gathered(rows.tolist())
            return
        own = self.run.fields(round_index)
        expected = _Expected(own, [0] * len(rows), range(len(rows)), (1.0,) * len(rows))
        self.screen(expected, rows)

    def check_gathered(self, rows: Sequence[Sequence[float]]) -> None:
        """Raise a PeerError, the same on all ranks, if the headers of two ranks differ."""
        self.run.compare_all(rows)
        for rank, row in enumerate(rows):
            if row[counts.NONFINITE] and rank != self.run.group_rank:
                self._nonfinite_senders[rank] = row[counts.NONFINITE]

    def raise_nonfinite(self) -> None:
        """Raise a NonFiniteError that names the senders of nan or inf since the last call.

        Only if ``nonfinite`` is "raise". The round in which they were received is complete.
        """
        senders, self._nonfinite_senders = self._nonfinite_senders, {}
        if senders and self.run.counts.policy == "raise":
            counted = ", ".join(
                f"{int(number)} entries that are nan or inf on rank {self.run.global_rank(sender)}"
                for sender, number in senders.items()
            )
            raise NonFiniteError(f"{self.run.here}: gradients must be finite, got {counted}")

    def check_rows(self, expected: _Expected, rows: Sequence[Sequence[float]]) -> None:
        """Raise a PeerError, with both ranks and values, if a received row is not as expected."""
        shares: Sequence[float | None] = expected.masses or [None] * len(rows)
        for sender, row, length, share in zip(
            expected.senders, rows, expected.lengths, shares, strict=True
        ):
            own = expected.own
            if length != own[2]:
                own = [*own[:2], length, *own[3:]]
            if row[counts.TRAINER : counts.NONFINITE] != own:
                me, there = self.run.rank, self.run.global_rank(sender)
                edge = f"the message on edge {there} -> {me}"
                self.run.compare(edge, (self.run.group_rank, sender), row, own)
            mass = row[counts.MASS]
            if share is None:
                fits = 0 < mass <= self.run.size
            else:
                fits = abs(mass - share) <= _TOLERANCE * share
            if not fits:
                rule = f"in (0, {self.run.size}]" if share is None else f"its share {share}"
                me, there = self.run.rank, self.run.global_rank(sender)
                raise PeerError(
                    f"{self.run.at_round(own)}: the mass of the message on edge {there} -> {me} "
                    f"must be {rule}, got {mass} from rank {there}: load a valid state on that "
                    "rank"
                )
            if row[counts.NONFINITE]:
                self._nonfinite_senders[sender] = row[counts.NONFINITE]

    def screen(self, expected: _Expected, rows: Tensor) -> Tensor:
        """Check received rows, (k, 8), on their device, which the host does not wait for.

        Return their masses, (k,): 0 for messages that are not what they must be.
        """
        counter = self._counter_on(rows.device)
        self._recent.append((expected, rows))
        low, high = [0.0] * len(rows), [float(self.run.size)] * len(rows)
        if expected.masses:
            low, high = (
                [m * (1 + each) for m in expected.masses] for each in (-_TOLERANCE, _TOLERANCE)
            )
        trainer, round_index, _, *others = expected.own
        wanted = [
            [least, trainer, round_index, length, *others, most]
            for least, length, most in zip(low, expected.lengths, high, strict=True)
        ]
        table = torch.tensor(wanted, dtype=torch.float64, device="cpu").view(-1, counts.NUM_FIELDS)
        return screen_headers(rows, table, counter=counter.tensor)

    def _counter_on(self, device: torch.device) -> CorruptCounter:
        if self._counter is None:
            self._counter = CorruptCounter(device)
        return self._counter

    def _raise_counted(self, device: torch.device) -> None:
        """Raise for messages that an earlier round has counted; waits for nothing without any."""
        count = self._counter_on(device).num_unreported()
        if not count:
            return
        num_left_out = count % NONFINITE_UNIT
        num_nonfinite = count % FORWARDS_UNIT // NONFINITE_UNIT
        recent, self._recent = list(self._recent), deque(maxlen=_NUM_RECENT)
        for expected, rows in recent:  # names ranks and values; also warns
            self.check_rows(expected, rows.tolist())
        if num_left_out:
            raise PeerError(
                f"{self.run.place(None)}: messages must have the header that this rank expects, "
                f"got {num_left_out} with another one, which were left out: ranks no longer agree; "
                "stop the run and load a checkpoint"
            )
        if num_nonfinite:
            self.raise_nonfinite()


class RoundHeaders(NamedTuple):
    """The headers of one buffer's messages in a round.

    ``sent``, (k, 8), and ``received``, (m, 8), are float64 and go with the messages.
    """

    headers: MessageHeaders
    expected: _Expected
    sent: Tensor
    received: Tensor

    @property
    def round_index(self) -> int:
        """The round in the header received from the first sender, which has arrived."""
        return int(self.received[0, counts.ROUND])

    def check(self) -> Tensor:
        """Return the received masses, (m,), after a check of the headers, which have arrived."""
        if self.received.device.type != "cpu":
            return self.headers.screen(self.expected, self.received)
        self.headers.check_rows(self.expected, self.received.tolist())
        return self.received[:, counts.MASS].contiguous()
