"""The run of a trainer on this rank, which errors name and ranks compare."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from .consistency import check_consistent_across_ranks, check_same_call, error_of, gather_rows
from .counts import (
    ANY,
    FORWARDS,
    MASS,
    MUST_BE_EQUAL,
    NONFINITE,
    STEPS,
    TRAINER,
    Call,
    StepCounts,
    find_difference,
    format_number,
    make_row,
)
from .errors import PeerError, find_call, place_of
from .failures import disconnect, is_of_backend, peer_error, quote
from .process_groups import create_group, device_of, give_back
from .reports import Reports
from .stats import CommStats
from .waiting import Waiting


class Run:
    """A trainer's run on this rank: its group, its number, its counts, and the errors that name it.

    Whatever communicates for a trainer gets it, so one place knows the group, the step and the
    errors. Rank numbers of ``group`` count from 0; errors and ``rank`` have global ones.
    ``Run(process_group)`` has no number, for communication outside of any trainer; None is the
    default group, or a single rank if none was initialized. ``within`` is the run of the same
    trainer whose group's ranks ``process_group`` has a part of. ``replica`` is the run of the
    ranks that together hold one replica, such as FSDP2's shards, each of which has a ``group`` of
    its own with its counterparts of other replicas; None: this rank holds a whole one.
    ``stats`` are bytes sent and seconds waited for training, in all groups of the trainer;
    ``read_loss`` is called with the loss of each batch that the user records.
    """

    _open: ClassVar["weakref.WeakSet[Run]"] = weakref.WeakSet()  # trainers of this process

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        counts: StepCounts | None = None,
        trainer: int | None = None,
        within: "Run | None" = None,
        replica: "Run | None" = None,
    ) -> None:
        is_alone = process_group is None and not dist.is_initialized()
        self._group = process_group
        self.rank = 0 if is_alone else dist.get_rank()
        self.group_rank = 0 if is_alone else dist.get_rank(process_group)
        self.size = 1 if is_alone else dist.get_world_size(process_group)
        if self.group_rank < 0:
            fix = "create the trainer on its ranks only"
            raise ValueError(f"process_group must contain this rank, got one without it; {fix}")
        self.counts = StepCounts(ANY) if counts is None else counts
        self.trainer, self._within, self.replica = trainer, within, replica
        self._world = None if is_alone else weakref.ref(dist.group.WORLD)
        self._interrupted: str | None = None  # what an interrupt has left half done
        self._is_closed = self._has_warned = self._survives = False
        self.read_loss: list[Callable[[Tensor | float], None]] = []
        self.stats: CommStats = CommStats() if within is None else within.stats
        # References, as a group that is held would outlive destroy_process_group().
        self._groups: list[weakref.ref[dist.ProcessGroup]] = []
        if within is None:
            self._give_back = weakref.finalize(self, give_back, self._groups)
            self._give_back.atexit = False
        if trainer is not None and within is None:
            Run._open.add(self)

    @classmethod
    def open(
        cls,
        process_group: dist.ProcessGroup | None,
        counts: StepCounts | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ) -> "Run":
        """Open the run of a new trainer, in a process group of its own with the ranks of another.

        With a ``replica_group``, of the ranks that hold one replica, also in one of those, in which
        only hosts communicate.

        All ranks must call this together, once for each trainer, after their arguments have been
        checked. Trainers are numbered in the order of their creation, equally on all ranks. NCCL
        that cannot create a group of some ranks alone is a ValueError.
        """
        counts = counts or StepCounts()
        if process_group is None and not dist.is_initialized():
            return cls(counts=counts)
        if len(Run._open) > 8:
            gc.collect()  # trainers in reference cycles give their groups back
        parent = cls(process_group)
        group = parent._create_group(range(parent.size))
        own = max((each.trainer for each in Run._open if each.trainer is not None), default=-1) + 1
        number = torch.tensor(own, device=device_of(group))
        try:
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            what = "the trainer's number could not be agreed on"
            raise cls(group).error(what, error, step=None) from error
        replica, groups = None, [group]
        if replica_group is not None:
            whole = cls(replica_group)
            groups.append(whole._create_group(range(whole.size), backend="gloo"))
            replica = cls(groups[-1], counts=counts)
        run = cls(group, counts=counts, trainer=int(number), replica=replica)
        run._groups.extend(map(weakref.ref, groups))
        return run

    def within(
        self, members: Sequence[int], backend: str | None = None, *, for_p2p: bool = False
    ) -> "Run":
        """Return the run of the same trainer in a new group of its ranks, as ``create_group``."""
        group = self._create_group(members, backend=backend, for_p2p=for_p2p)
        self._root._groups.append(weakref.ref(group))
        return Run(
            group, counts=self.counts, trainer=self.trainer, within=self, replica=self.replica
        )

    def _create_group(self, members: Sequence[int], **options: Any) -> dist.ProcessGroup:
        try:
            return create_group(members, self.group, **options)
        except RuntimeError as error:
            what = f"a process group of ranks {list(members)} could not be created"
            suspects = map(self.global_rank, members)
            raise self.error(what, error, suspects=suspects, step=None) from error

    def regroup(self, *, compares_steps: bool = True) -> None:
        """Go on in another default group, where an error disconnects this rank, and no more."""
        self._world, self._survives = weakref.ref(dist.group.WORLD), True
        self.rank = self.group_rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.counts.reset(are_compared=compares_steps)
        self.mend()

    @property
    def _root(self) -> "Run":
        """The trainer's first run; no attribute, as a cycle would keep the group's threads."""
        return self if self._within is None else self._within._root

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the process group, None for the default one; a RuntimeError if it is closed."""
        if self._is_closed:
            raise RuntimeError("a trainer's process group must not be used after close()")
        return self._group

    def check_usable(self) -> None:
        """Raise a RuntimeError if the groups were destroyed, or an interrupt has ended a step."""
        if self._world is not None and dist.group.WORLD is not (self._world() or self):
            raise RuntimeError(
                "the process group must exist in every step, got one after destroy_process_group();"
                " call that after the last step, create the trainer again in another group, or "
                "close() a GossipDataParallel to step it alone"
            )
        if self._interrupted is not None:
            raise RuntimeError(
                f"a step must end on all ranks, got one after {self._interrupted}: ranks may have "
                "unequal parameters; load a state on all of them, or create the trainer again"
            )

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Communicate inside; after an interrupt inside every later step is refused."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self._interrupted = f"{type(error).__name__} at {self.here}"
            raise

    def mend(self) -> None:
        """Allow steps again: all ranks have loaded a state."""
        self._interrupted = None

    @property
    def here(self) -> str:
        """Return this rank's place at the step it is in: "rank 0, trainer 1, step 12"."""
        return self.place(None if self.counts.steps == ANY else self.counts.steps)

    def place(self, step: int | None) -> str:
        """Return this rank's place, with its trainer if the process has several."""
        numbers = {each.trainer for each in Run._open}
        return place_of(self.rank, step, self.trainer if len(numbers) > 1 else None)

    def describe_call(self, call: str) -> str:
        """Return a call with its step, and with its trainer if the process has several."""
        is_one = self.trainer is None or len({each.trainer for each in Run._open}) == 1
        return self.counts.describe(call) + ("" if is_one else f" of trainer {self.trainer}")

    def waiting(self, stats: CommStats | None = None) -> Waiting:
        """Return a context for waits, whose seconds count in ``stats``; a long one warns."""
        return Waiting(self._group, self.describe_call, stats)

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def error(
        self,
        what: str,
        cause: RuntimeError,
        *,
        suspects: Iterable[int] | None = None,
        otherwise: str = "ended without this call",
        closes: bool = True,
        step: int | None = ANY,
    ) -> PeerError:
        """Return the error as ``peer_error`` does; ``step`` None: of none, ``ANY``: this one."""
        place = self.here if step == ANY else self.place(step)
        if self._survives:
            disconnect(self.group)
            return PeerError(f"{place}: {what} ({quote(cause)})")
        return peer_error(
            self.group, place, what, cause, call=self.describe_call(find_call()),
            reports=self.reports(), suspects=suspects, otherwise=otherwise, closes=closes,
        )  # fmt: skip

    def reports(self) -> Reports:
        """Return the reports of the trainer's ranks that fail together."""
        return Reports(self._root.group)

    @contextmanager
    def raising(self, what: str, *, step: int | None = ANY) -> Iterator[None]:
        """Raise errors of torch's own communication inside the context as those of ``error``."""
        try:
            yield
        except RuntimeError as error:
            if not is_of_backend(error):
                raise
            raise self.error(what, error, step=step) from error

    def agree(
        self,
        config_fields: Sequence[tuple[str, str]],
        problem: str | TypeError | None,
        call: Call = Call.ARGUMENTS,
    ) -> None:
        """Do ``check_consistent_across_ranks`` in the group, whose ranks all call this."""
        replica_group = None if self.replica is None else self.replica.group
        if self.size > 1 or replica_group is not None:
            check_consistent_across_ranks(config_fields, problem, self.group, call, replica_group)
        elif problem:
            raise error_of({0: problem})

    def barrier(self) -> None:
        """Return once all ranks of the group have called it; with NCCL once it is queued."""
        with self.raising("not all ranks reached the barrier"), self.waiting():
            dist.all_reduce(torch.zeros(1, device=device_of(self.group)), group=self.group)

    def fields(
        self, round_index: int = ANY, length: int = 0, *, has_counts: bool = True
    ) -> list[float]:
        """Return what ranks compare of each other: trainer, round, length in bytes and counts."""
        counts = self.counts
        steps, repeats, forwards = counts.steps, counts.repeats, counts.forwards
        if not (counts.are_compared and has_counts):
            steps = repeats = forwards = ANY
        return [self.trainer or 0, round_index, length, steps, repeats, forwards]

    def row(self, device: torch.device, round_index: int = ANY) -> Tensor:
        """Return this rank's row of an exact average, (8,) float64 on the device."""
        return make_row(1.0, self.fields(round_index), self.counts.nonfinite, device)

    def check_equal_steps(self, device: torch.device) -> None:
        """Raise on all ranks if one has skipped or repeated a step, before it is waited for."""
        if self.size == 1:
            return
        with self.raising("the all-gather failed"), self.waiting():
            rows = gather_rows(self.row(device), self.group)
        self.compare_all(rows.tolist())

    def compare_all(self, rows: Sequence[Sequence[float]]) -> None:
        """Compare the rows of all ranks; a PeerError names the same two on all."""
        check_same_call(rows, {row[MASS] for row in rows if row[MASS] >= 0}, self.group)
        first = next((rank for rank, row in enumerate(rows) if row[STEPS] != ANY), 0)
        fields = rows[first][TRAINER:NONFINITE]
        for rank, row in enumerate(rows):
            if find_difference(row, fields):  # else no group is named, which may have ended
                subject = f"the parameters that rank {self.global_rank(rank)} averages"
                self.compare(subject, (first, rank), row, fields)

    def compare(
        self, subject: str, ranks: tuple[int, int], row: Sequence[float], fields: Sequence[float]
    ) -> None:
        """Compare the second rank's row (8,) with the first one's fields (6,), or a PeerError."""
        difference = find_difference(row, fields)
        if difference is None:
            return
        field, ours, theirs = difference
        here, there = (self.global_rank(rank) for rank in ranks)
        values = f"{int(ours)} on rank {here} and {format_number(theirs)} on rank {there}"
        if field == FORWARDS:
            self._warn_of_forwards(values)
            return
        rule, fix = MUST_BE_EQUAL[field]
        raise PeerError(f"{self.at_round(fields)}: {subject} must be {rule}, got {values}: {fix}")

    def at_round(self, fields: Sequence[float]) -> str:
        """Return this rank's place in the round of some fields."""
        return self.place(None if fields[1] == ANY else int(fields[1]))

    def close(self) -> None:
        """End the run: its trainer is no more among this process's, and gives its groups back."""
        self._is_closed, self._group = True, None
        if self.replica is not None and self._within is None:
            self.replica.close()
        self._give_back()
        Run._open.discard(self)

    def _warn_of_forwards(self, values: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.place(None)}: the ranks have run unequal numbers of training forwards, "
                f"{values}: expected if they accumulate gradients over unequal numbers of batches; "
                "otherwise one of them has skipped a batch, after which ranks no longer step alike",
                stacklevel=2,
            )
