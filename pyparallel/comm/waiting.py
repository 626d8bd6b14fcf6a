"""A warning on ranks that wait for others for long: which call each of them is in."""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Thread, get_ident
from types import FrameType

import torch.distributed as dist

from .errors import compare_calls, find_call, name_ranks
from .stats import CommStats
from .store import store_of, timeout_of

_LONGEST_SECONDS = 30.0  # before a warning, which is half of a shorter timeout
_LOOK_SECONDS = 0.5

_waits: "dict[int, Waiting]" = {}  # of each thread that waits


@dataclass(eq=False, slots=True)
class Waiting:
    """A wait for other ranks of a group, whose seconds count in ``stats``.

    After 30 s, or half of the group's timeout, a warning says which call each rank is in.
    ``describe`` adds the step to the name of a call. As a generator it would take
    four times as long, in every wait.
    """

    group: dist.ProcessGroup | None
    describe: Callable[[str], str] = str
    stats: CommStats | None = None
    begin: float = 0.0
    is_published: bool = False
    has_warned: bool = False
    before: "Waiting | None" = None  # a wait of the same thread around this one

    def __enter__(self) -> None:
        if not _waits:
            _start()
        thread = get_ident()
        self.before = _waits.get(thread)
        _waits[thread] = self
        self.begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.stats is not None:
            self.stats.waiting_seconds += time.perf_counter() - self.begin
        if self.before is None:
            del _waits[get_ident()]
        else:
            _waits[get_ident()] = self.before
        if self.is_published:
            _publish("")

    def look(self, frame: FrameType) -> tuple[str, float]:
        """Return its call if that is to be published now, and its seconds if a warning is due."""
        limit = min(_LONGEST_SECONDS, timeout_of(self.group).total_seconds() / 2)
        seconds = time.perf_counter() - self.begin
        if not self.is_published and seconds > limit / 2:
            self.is_published = True
            return self.describe(find_call(frame)), 0.0
        if self.has_warned or seconds < limit:
            return "", 0.0
        self.has_warned = True
        return "", seconds


@cache
def _start() -> None:
    # A daemon: it must not keep the process.
    Thread(target=_watch, name="waits", daemon=True).start()


def _watch() -> None:
    """Look at the waits of this process for ever, and keep none: each refers to a group."""
    while True:
        time.sleep(_LOOK_SECONDS)
        for thread in list(_waits):
            # The group has ended, or the store is gone: what waits for it raises that.
            with suppress(RuntimeError, KeyError):
                call, seconds = _waits[thread].look(sys._current_frames()[thread])
                if call:
                    _publish(call)
                    if not _waits[thread].is_published:  # another wait, as that one has ended
                        _publish("")
                if seconds:
                    warnings.warn(_compare(seconds), stacklevel=1)


def _publish(call: str) -> None:
    with suppress(RuntimeError):
        store_of(None).set(f"waits/{dist.get_rank()}", call)


def _compare(seconds: float) -> str:
    """Return what this rank has waited for: the calls of all ranks that wait too."""
    ranks = range(dist.get_world_size())
    calls = {rank: call for rank in ranks if (call := store_of(None).get(f"waits/{rank}"))}
    text = f"rank {dist.get_rank()} has waited for {seconds:.0f} s: {compare_calls(calls)}"
    others = [rank for rank in ranks if rank not in calls]
    return f"{text}; {name_ranks(others)} computes, hangs or died" if others else text
