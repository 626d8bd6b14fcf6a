"""What ranks publish in the store when their communication has ended, so that one finds out why."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from .errors import PeerError, compare_calls
from .store import store_of, timeout_of

_CLOSED_SECONDS = 1.0  # for the report of a rank whose connection is closed: it may be alive
_LONGEST_STAY_SECONDS = 30.0  # of the store's host, for ranks that compute before they find out
_READERS_SECONDS = 2.0  # that rank 0 stays for ranks that read the reports
_POLL_SECONDS = 0.02
DIED, SILENT = "died", "silent"


@dataclass(frozen=True)
class Report:
    """What a rank publishes when its communication has ended."""

    place: str  # its rank, trainer and step
    waited_for: Sequence[int]  # global ranks
    call: str  # of the user, with its step
    failed: Sequence[int] = ()  # global ranks that it has found to have failed
    # "died" or "silent"; or the error of a rank whose own call was at fault; or the calls of ranks
    # that wait for each other; or why nothing is known.
    how: str = ""


class Reports:
    """The reports of ranks that fail together: those of a trainer, or of a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        chosen: Any = group or dist.group.WORLD
        self._group, self._me = chosen, dist.get_rank()
        self._prefix = f"failures/{chosen.group_name}"
        self._store = store_of(None)

    def publish(self, report: Report) -> None:
        """Let the other ranks read this rank's report."""
        self._store.set(f"{self._prefix}/{self._me}", json.dumps(asdict(report)))
        self._store.set(f"waiting/{self._me}", json.dumps([self._prefix, report.call]))

    def find_failed(self, own: Report, closed: set[int], seconds: float) -> Report:
        """Publish this rank's report; return it with the ranks that failed, or none if all wait."""
        try:
            earlier = self._read().get(self._me)
            if earlier is not None and earlier.failed:  # this error follows from that one
                return replace(own, failed=earlier.failed, how=earlier.how)
            self.publish(own)
            found = self._find_failed(own, closed, seconds)
            if found.failed:
                self.publish(found)
        except PeerError as error:  # the store is gone: what gloo knows remains
            how = DIED if closed else SILENT
            suspects = closed or {*own.waited_for}
            if self._store.host_rank in suspects:
                return replace(own, failed=[self._store.host_rank], how=how)
            if closed:
                return replace(own, failed=sorted(closed & {*own.waited_for} or closed), how=how)
            return replace(own, how=str(error))
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
                return replace(own, failed=sorted(missing & closed), how=DIED)
            calls = {rank: report.call for rank, report in reports.items()}
            if waited > min(seconds, _CLOSED_SECONDS):  # it may be left from an earlier failure
                calls |= self._calls_elsewhere(missing - closed)
            if not missing - calls.keys():
                return replace(own, how=compare_calls(calls) if len(calls) > 1 else "")
            if waited > seconds:
                return replace(own, failed=sorted(missing - calls.keys()), how=SILENT)
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

    def agree(self, text: str, without_store: str) -> str:
        """Publish the text of this rank's error unless another rank has; return the published one.

        ``without_store`` is what all ranks come to if the store is gone.
        """
        try:
            return self._store.setdefault(f"{self._prefix}/text", text)
        except PeerError:
            return without_store

    def end_agreement(self, *, waits: bool) -> None:
        """Note that this rank reads no more; where the store is, wait for the others if ``waits``.

        At most for half of the group's timeout and 30 s: a rank may compute before it finds out.
        """
        seconds = min(timeout_of(self._group).total_seconds() / 2, _LONGEST_STAY_SECONDS) * waits
        with suppress(PeerError):  # the store is gone: nobody needs it
            self._store.set(f"{self._prefix}/left/{self._me}", "")
            end = time.monotonic() + seconds
            while self._store.may_be_here and time.monotonic() < end:
                failed = {rank for report in self._read().values() for rank in report.failed}
                others = {*dist.get_process_group_ranks(self._group)} - failed - {self._me}
                if self._store.wait([f"{self._prefix}/left/{rank}" for rank in others], 0):
                    return
                time.sleep(_POLL_SECONDS)

    def _read(self) -> dict[int, Report]:
        texts = {
            rank: self._store.get(f"{self._prefix}/{rank}") for rank in range(dist.get_world_size())
        }
        return {rank: Report(**json.loads(text)) for rank, text in texts.items() if text}

    def _calls_elsewhere(self, ranks: Iterable[int]) -> dict[int, str]:
        texts = {rank: self._store.get(f"waiting/{rank}") for rank in ranks}
        found = {rank: json.loads(text) for rank, text in texts.items() if text}
        return {rank: call for rank, (prefix, call) in found.items() if prefix != self._prefix}


def _missing_of(rank: int, reports: Mapping[int, Report]) -> set[int]:
    """Return the ranks without a report that a rank waited for, itself or through others."""
    pending, seen = [rank], {rank}
    while pending:
        report = reports.get(pending.pop())
        new = set() if report is None else {*report.waited_for} - seen
        seen |= new
        pending += new
    return seen - reports.keys()
