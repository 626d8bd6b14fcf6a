"""Which rank has failed, found out when communication between ranks ends in an error.

A rank whose communication ends publishes a report in the store: which ranks it waited for. A rank
that died or hangs publishes none. So the reports, followed from the ranks that this one waited for
to those that they waited for, lead to the rank that failed; others have only closed their
connections because of it. Gloo tells which connections are closed.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PeerError, first_group_of, place_of, trainer_to_name
from .store import store_of, timeout_of

_LONGEST_SECONDS = 5.0  # for the reports of ranks whose own timeout ends a little later
_CLOSED_SECONDS = 1.0  # for the report of a rank whose connection is closed: it may be alive
_LONGEST_STAY_SECONDS = 30.0  # of the store's host, for ranks that compute before they find out
_READERS_SECONDS = 2.0  # that rank 0 stays for ranks that read the reports
_POLL_SECONDS = 0.02
_TAG = 2**31 - 2  # of receives for which nothing is sent; no payload of a gossip round has it

# What gloo, NCCL and the store write into errors that another rank, or the network, has caused.
_OF_PEERS = re.compile(r"gloo|nccl|timed? ?out|connect|socket|broken pipe|store", re.IGNORECASE)
# What a backend itself raises: a place in gloo, or a type of torch.distributed.
_OF_BACKENDS = re.compile(r"gloo/|torch.distributed.Dist\w*Error")
_OF_TIMEOUTS = re.compile(r"timed? ?out", re.IGNORECASE)

_DIED, _SILENT = "died", "silent"
_kept: list[tuple[Tensor, Any]] = []  # receives for which nothing is sent: gloo has their memory


@dataclass(frozen=True)
class Report:
    """What a rank publishes when its communication has ended.

    Args:
        place: its rank, trainer and step.
        waited_for: global ranks.
        failed: the global ranks that it has found to have failed; empty: none yet.
        how: "died" or "silent"; or the error of a rank whose own call was at fault; or the places
            of ranks that wait for each other.
    """

    place: str
    waited_for: Sequence[int]
    failed: Sequence[int] = ()
    how: str = ""


def peer_error(
    process_group: dist.ProcessGroup | None,
    step: int | None,
    what: str,
    error: RuntimeError,
    *,
    suspects: Iterable[int] | None = None,
    otherwise: str = "ended without this call",
    closes: bool = True,
) -> PeerError:
    """Find out which rank has failed; return the error of communication that ended because of it.

    Waits up to a fourth of the group's timeout, at most 5 s, for the reports of other ranks.

    Args:
        process_group: in which the communication was; None: the default group.
        step: the step in which it happened; None outside of steps.
        what: what happened, such as "the all-reduce failed".
        error: torch's error; a PeerError is returned as it is.
        suspects: global ranks that this rank waited for; None: all others of the group.
        otherwise: what else than dying may have closed a rank's connection.
        closes: close the connections of the group, so that ranks which wait for this one end too.
    """
    if isinstance(error, PeerError):
        return error
    group: Any = process_group or dist.group.WORLD
    me, members = dist.get_rank(), dist.get_process_group_ranks(group)
    waited_for = sorted({*(members if suspects is None else suspects)} - {me})
    own = Report(place_of(me, step, trainer_to_name(process_group)), waited_for)
    quoted = _quote(error)
    if not _OF_PEERS.search(str(error)):
        found = replace(own, failed=[me], how=quoted)
        _Reports(group, me).publish(found)
        return _with(PeerError(f"{own.place}: {what} on this rank: {quoted}"), found)
    timed_out = _OF_TIMEOUTS.search(str(error)) is not None
    closed = set() if timed_out else _closed_of(group, members, me)  # a timeout closes them all
    timeout = timeout_of(process_group).total_seconds()
    reports = _Reports(group, me)
    found = reports.find_failed(own, closed, min(timeout / 4, _LONGEST_SECONDS))
    if closes:
        _close(group)
    if me == 0:
        reports.wait_for_readers(found)
    silent = f"did not respond within the process group's timeout of {timeout:g} s"
    text = _describe(found, me, silent, otherwise)
    return _with(PeerError(f"{own.place}: {what}: {text} ({quoted})"), found, silent, otherwise)


@contextmanager
def raising_peer_errors(
    process_group: dist.ProcessGroup | None, step: int | Callable[[], int] | None, what: str
) -> Iterator[None]:
    """Raise errors of torch's own communication inside the context as those of `peer_error`.

    All others, such as a user's in a forward pass, stay as they are.

    Args:
        process_group: in which torch communicates; None: the default group.
        step: as of ``peer_error``, or a function that returns it when there is an error.
        what: as of ``peer_error``.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not _OF_BACKENDS.search(f"{type(error)} {error}"):
            raise
        step = step() if callable(step) else step
        raise peer_error(process_group, step, what, error) from error


def agree_on_error(process_group: dist.ProcessGroup | None, text: str, without_store: str) -> str:
    """Publish the text of this rank's error, unless another rank has; return what was published.

    So all ranks of a trainer that fail together raise one text.

    Args:
        process_group: the trainer's, or one of it; None: the default group.
        text: of the error that this rank has found.
        without_store: what to return if the store is gone, maybe with the rank that failed: a text
            that other ranks come to as well.
    """
    try:
        return _Reports(process_group or dist.group.WORLD, dist.get_rank()).agree(text)
    except PeerError:
        return without_store


def end_agreement(process_group: dist.ProcessGroup | None, *, waits: bool) -> None:
    """Let the others know that this rank has agreed on an error; where the store is, wait for them.

    The ranks that failed are not waited for, and the others for at most half of the group's timeout
    and 30 s: a rank may compute before it finds out.

    Args:
        process_group: as of `agree_on_error`.
        waits: for others.
    """
    seconds = min(timeout_of(process_group).total_seconds() / 2, _LONGEST_STAY_SECONDS)
    with suppress(PeerError):  # the store is gone: nobody needs it
        _Reports(process_group or dist.group.WORLD, dist.get_rank()).leave(seconds * waits)


def _with(error: PeerError, found: Report, silent: str = "", otherwise: str = "") -> PeerError:
    """Set the attributes of an error by what was found."""
    error.failed = tuple(found.failed)
    error.how = _describe_how(found, silent, otherwise)
    return error


def _describe(found: Report, me: int, silent: str, otherwise: str) -> str:
    """Return what the failed ranks have done; of ranks that wait for each other, their places."""
    if not found.failed:
        return f"{_names(found.waited_for)} {silent}{found.how}"
    names = "this rank" if list(found.failed) == [me] else _names(found.failed)
    return f"{names} {_describe_how(found, silent, otherwise)}"


def _describe_how(found: Report, silent: str, otherwise: str) -> str:
    if found.how == _DIED:
        return f"died, or {otherwise}"
    return silent if found.how == _SILENT else f"failed: {found.how}"


def _names(ranks: Sequence[int]) -> str:
    """Return "rank 2", or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _quote(error: RuntimeError) -> str:
    """Return an error's first line; of gloo's its first sentence, without the file it is from."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    text, is_of_gloo = re.subn(r"^\[\S*gloo\S*\] *", "gloo: ", first)
    return text.split(". ")[0] if is_of_gloo else text


def _closed_of(group: Any, members: Sequence[int], me: int) -> set[int]:
    """Return the global ranks whose gloo connections in a group are closed."""
    is_gloo = "gloo" in dist.get_backend_config(group)
    others = [(index, rank) for index, rank in enumerate(members) if rank != me and is_gloo]
    return {rank for index, rank in others if _post_receive(group, index) is None}


def _close(group: Any) -> None:
    """Close the gloo connections of a group, which a receive's timeout does."""
    if "gloo" not in dist.get_backend_config(group):
        return
    for index in range(dist.get_world_size(group)):
        if index != dist.get_rank(group) and (work := _post_receive(group, index)) is not None:
            with suppress(RuntimeError):  # which ends the wait for what nobody sends
                work.wait(datetime.timedelta(milliseconds=1))
            return


def _post_receive(group: Any, index: int) -> Any | None:
    """Return the work of a receive for which nothing is sent; None if the connection is closed."""
    tensor = torch.empty(1)
    try:
        work = group._get_backend(torch.device("cpu")).recv([tensor], index, _TAG)
    except RuntimeError:
        return None
    _kept.append((tensor, work))
    return work


class _Reports:
    """The reports of ranks that fail together: those of a trainer, or of a process group.

    Args:
        group: in which the communication was.
        me: this global rank.
    """

    def __init__(self, group: Any, me: int) -> None:
        self._group, self._me = group, me
        self._prefix = f"failures/{first_group_of(group)}"
        self._store = store_of(None)

    def publish(self, report: Report) -> None:
        """Let the other ranks read this rank's report."""
        self._store.set(f"{self._prefix}/{self._me}", json.dumps(asdict(report)))
        self._store.set(f"waiting/{self._me}", json.dumps([self._prefix, report.place]))

    def find_failed(self, own: Report, closed: set[int], seconds: float) -> Report:
        """Publish this rank's report, and return it with the ranks that failed.

        Args:
            own: this rank's report.
            closed: ranks whose connections are closed.
            seconds: to wait for other ranks' reports.

        Returns:
            The report; without failed ranks if all wait for each other.
        """
        try:
            earlier = self._read().get(self._me)
            if earlier is not None and earlier.failed:  # this error follows from that one
                return replace(own, failed=earlier.failed, how=earlier.how)
            self.publish(own)
            found = self._find_failed(own, closed, seconds)
            if found.failed:
                self.publish(found)
        except PeerError as error:  # the store is gone: what gloo knows remains
            how = _DIED if closed else _SILENT
            suspects = closed or {*own.waited_for}
            if self._store.host_rank in suspects:
                return replace(own, failed=[self._store.host_rank], how=how)
            if closed:
                return replace(own, failed=sorted(closed & {*own.waited_for} or closed), how=how)
            return replace(own, how=f"; {error}")
        return found

    def _find_failed(self, own: Report, closed: set[int], seconds: float) -> Report:
        begin = time.monotonic()
        while True:
            reports = self._read()
            for report in reports.values():
                if report.failed:
                    return replace(own, failed=report.failed, how=report.how)
            missing = _missing_of(self._me, reports)
            waited = time.monotonic() - begin
            if missing & closed and waited > min(seconds, _CLOSED_SECONDS):
                return replace(own, failed=sorted(missing & closed), how=_DIED)
            places = {rank: report.place for rank, report in reports.items() if rank != self._me}
            places |= self._places_elsewhere(missing - closed)
            if not missing - places.keys():
                where = "; ".join(places[rank] for rank in sorted(places))
                return replace(own, how=f"; waiting likewise: {where}" if where else "")
            if waited > seconds:
                return replace(own, failed=sorted(missing - places.keys()), how=_SILENT)
            time.sleep(_POLL_SECONDS)

    def wait_for_readers(self, found: Report) -> None:
        """Wait until the other ranks know what failed: rank 0 often hosts the store."""
        others = {*range(dist.get_world_size())} - {*found.failed, self._me}
        # Ranks that wait for each other have read each other's places by now, or nearly.
        end = time.monotonic() + (_READERS_SECONDS if found.failed else 10 * _POLL_SECONDS)
        with suppress(PeerError):
            while time.monotonic() < end:
                reports = self._read()
                if all(rank in reports and reports[rank].failed for rank in others):
                    return
                time.sleep(_POLL_SECONDS)

    def agree(self, text: str) -> str:
        """Publish a text, unless another rank has; return the one that was published."""
        return self._store.setdefault(f"{self._prefix}/text", text)

    def leave(self, seconds: float) -> None:
        """Note that this rank reads no more; stay some seconds for others, if the store is here."""
        self._store.set(f"{self._prefix}/left/{self._me}", "")
        end = time.monotonic() + seconds
        while self._store.may_be_here and time.monotonic() < end:
            failed = {rank for report in self._read().values() for rank in report.failed}
            others = {*dist.get_process_group_ranks(self._group)} - failed - {self._me}
            if self._store.wait([f"{self._prefix}/left/{rank}" for rank in others], 0):
                return
            time.sleep(_POLL_SECONDS)

    def _read(self) -> dict[int, Report]:
        """Return the reports that ranks have published."""
        texts = {
            rank: self._store.get(f"{self._prefix}/{rank}") for rank in range(dist.get_world_size())
        }
        return {rank: Report(**json.loads(text)) for rank, text in texts.items() if text}

    def _places_elsewhere(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the places of ranks that wait in another trainer."""
        texts = {rank: self._store.get(f"waiting/{rank}") for rank in ranks}
        found = {rank: json.loads(text) for rank, text in texts.items() if text}
        return {rank: place for rank, (prefix, place) in found.items() if prefix != self._prefix}


def _missing_of(rank: int, reports: Mapping[int, Report]) -> set[int]:
    """Return the ranks without a report that a rank waited for, itself or through others."""
    pending, seen = [rank], {rank}
    while pending:
        report = reports.get(pending.pop())
        new = set() if report is None else {*report.waited_for} - seen
        seen |= new
        pending += new
    return seen - reports.keys()
