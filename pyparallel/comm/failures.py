"""Which rank has failed, found out when communication between ranks ends in an error.

A rank whose communication ends publishes a report in the store: which ranks it waited for. A rank
that died or hangs publishes none. So the reports, followed from the ranks that this one waited for
to those that they waited for, lead to the rank that failed; others have only closed their
connections because of it. Gloo tells which connections are closed.
"""

import datetime
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import SAME_CALLS, PeerError, find_call
from .profiling import post
from .reports import DIED, SILENT, Report, Reports
from .store import timeout_of

_LONGEST_SECONDS = 5.0  # for the reports of ranks whose own timeout ends a little later
_TAG = 2**31 - 2  # of receives for which nothing is sent; no payload of a gossip round has it

# What gloo, NCCL and the store write into errors that another rank, or the network, has caused.
_OF_PEERS = re.compile(r"gloo|nccl|timed? ?out|connect|socket|broken pipe|store", re.IGNORECASE)
# What a backend itself raises: a place in gloo, or a type of torch.distributed.
_OF_BACKENDS = re.compile(r"gloo/|torch.distributed.Dist\w*Error")
# What the operating system refuses to this process, also if gloo says it.
_OF_THIS_RANK = re.compile(r"too many open files|cannot allocate memory|bad_alloc", re.IGNORECASE)
_OF_TIMEOUTS = re.compile(r"timed? ?out", re.IGNORECASE)
_OF_LINKS = "; if it runs, `python -m pyparallel doctor --links` shows which link is down"

_kept: list[tuple[Tensor, Any]] = []  # receives for which nothing is sent: gloo has their memory


def peer_error(
    process_group: dist.ProcessGroup | None,
    place: str,
    what: str,
    error: RuntimeError,
    *,
    call: str | None = None,
    reports: "Reports | None" = None,
    suspects: Iterable[int] | None = None,
    otherwise: str = "ended without this call",
    closes: bool = True,
) -> PeerError:
    """Find out which rank has failed; return the error of communication that ended because of it.

    Waits up to a fourth of the group's timeout, at most 5 s, for the reports of other ranks.

    ``place`` is of this rank, ``what`` happened, such as "the all-reduce failed", and ``call`` is
    the user's, None: as ``find_call`` finds it. ``reports`` are shared with the ranks that fail
    together, ``suspects`` the global ranks that this one waited for (None: all of the group), and
    ``otherwise`` is what else may have closed a connection.
    ``closes`` the connections of the group, so that ranks which wait for this one end too.
    """
    if isinstance(error, PeerError):
        return error
    group: Any = process_group or dist.group.WORLD
    me, members = dist.get_rank(), dist.get_process_group_ranks(group)
    waited_for = sorted({*(members if suspects is None else suspects)} - {me})
    own = Report(place, waited_for, call or find_call())
    quoted = quote(error)
    reports = reports or Reports(group)
    refused = _refused(str(error))
    if refused or not _OF_PEERS.search(str(error)):
        found = replace(own, failed=[me], how=refused or quoted)
        reports.publish(found)
        return _with(PeerError(f"{own.place}: {what} on this rank: {refused or quoted}"), found)
    timed_out = _OF_TIMEOUTS.search(str(error)) is not None
    closed = set() if timed_out else _closed_of(group, members, me)  # a timeout closes them all
    timeout = timeout_of(process_group).total_seconds()
    found = reports.find_failed(own, closed, min(timeout / 4, _LONGEST_SECONDS))
    if closes:
        disconnect(group)
    if me == 0:
        reports.wait_for_readers(found)
    silent = f"did not respond within the process group's timeout of {timeout:g} s"
    text = _describe(found, me, silent, otherwise)
    fix = _OF_LINKS if silent in text and SAME_CALLS not in text else ""
    found_out = PeerError(f"{own.place}: {what}: {text} ({quoted}){fix}")
    return _with(found_out, found, silent, otherwise)


def is_of_backend(error: RuntimeError) -> bool:
    """Return whether torch's communication has raised an error, and not the user's code."""
    of_torch = _OF_BACKENDS.search(f"{type(error)} {error}") is not None
    return of_torch and not isinstance(error, PeerError)


def _refused(text: str) -> str | None:
    """Return what the operating system has refused to this process, by an error's text, or None."""
    if found := _OF_THIS_RANK.search(text):
        return found[0]
    try:
        os.close(os.dup(1))
    except OSError as error:  # gloo may say that an address cannot be resolved
        return error.strerror
    return None


def _with(error: PeerError, found: Report, silent: str = "", otherwise: str = "") -> PeerError:
    error.failed = tuple(found.failed)
    error.how = _describe_how(found, silent, otherwise)
    return error


def _describe(found: Report, me: int, silent: str, otherwise: str) -> str:
    """Return what the failed ranks have done; of ranks that wait for each other, their places."""
    if not found.failed:
        how = f"; {found.how}" if found.how else ""
        return f"{_names(found.waited_for)} {silent}{how}"
    names = "this rank" if list(found.failed) == [me] else _names(found.failed)
    return f"{names} {_describe_how(found, silent, otherwise)}"


def _describe_how(found: Report, silent: str, otherwise: str) -> str:
    if found.how == DIED:
        return f"died, or {otherwise}"
    return silent if found.how == SILENT else f"failed: {found.how}"


def _names(ranks: Sequence[int]) -> str:
    """Return "rank 2", or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def quote(error: RuntimeError) -> str:
    """Return an error's first line; of gloo's its first sentence, without the file it is from."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    text, is_of_gloo = re.subn(r"^\[\S*gloo\S*\] *", "gloo: ", first)
    return text.split(". ")[0] if is_of_gloo else text


def _closed_of(group: Any, members: Sequence[int], me: int) -> set[int]:
    is_gloo = "gloo" in dist.get_backend_config(group)
    others = [(index, rank) for index, rank in enumerate(members) if rank != me and is_gloo]
    return {rank for index, rank in others if _post_receive(group, index) is None}


def disconnect(process_group: dist.ProcessGroup | None) -> None:
    """Close the gloo connections of a group, which a receive's timeout does."""
    group: Any = process_group or dist.group.WORLD
    if "gloo" not in dist.get_backend_config(group):
        return
    backend, tensor = group._get_backend(torch.device("cpu")), torch.empty(1, device="cpu")
    for index in range(dist.get_world_size(group)):
        if index != dist.get_rank(group):
            with suppress(RuntimeError):  # closed already, or closed by this wait's end
                post(backend.recv, [tensor], index, _TAG).wait(datetime.timedelta(milliseconds=1))


def _post_receive(group: Any, index: int) -> Any | None:
    """Return the work of a receive for which nothing is sent; None if the connection is closed."""
    tensor = torch.empty(1, device="cpu")
    try:
        work = post(group._get_backend(torch.device("cpu")).recv, [tensor], index, _TAG)
    except RuntimeError:
        return None
    _kept.append((tensor, work))
    return work
