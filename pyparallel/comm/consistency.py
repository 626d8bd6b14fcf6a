"""Consistency checks across ranks, so that a wrong argument on one rank never ends in a hang.

Ranks exchange JSON and never objects of Python: unpickling runs what another rank has sent.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PeerError
from .failures import peer_error
from .process_groups import device_of
from .store import store_of

# torch before 2.13 has the second name.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MAX_BYTES = 2**26  # of what one rank sends: the fields of about 600,000 tensors


class DisagreementError(ValueError):
    """An invalid argument on one rank, or one that differs; all ranks raise the same text."""


class ArgumentTypeError(DisagreementError, TypeError):
    """An argument of a wrong type; all ranks raise the same text."""


def check_consistent_across_ranks(
    config_fields: Sequence[tuple[str, str]],
    problem: str | TypeError | None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Raise the same error on all ranks if any has a problem or their configurations differ.

    Every rank of the group must call this, also one that has a problem: it must not raise alone.

    Args:
        config_fields: (name, value), in the same order on all ranks.
        problem: error message of this rank; a TypeError for a wrong type; or None.
        process_group: None: the default group.

    Raises:
        DisagreementError: names the ranks and their problem, or the first field that differs.
        ArgumentTypeError: (a DisagreementError) every problem is a TypeError.
        PeerError: a rank died or did not call this within the process group's timeout.
    """
    own = _Arguments(problem, [(str(name), str(value)) for name, value in config_fields])
    gathered = _all_gather(own, process_group)
    problems = {rank: each.problem for rank, each in enumerate(gathered) if each.problem}
    if problems:
        raise error_of(problems)
    for rank, each in enumerate(gathered):
        difference = first_difference(gathered[0].config_fields, each.config_fields)
        if difference:
            raise DisagreementError(
                f"all ranks must have the same {difference[0]}, got {difference[1]} on rank 0 "
                f"and {difference[2]} on rank {rank}"
            )


class _Arguments(NamedTuple):
    """What a rank sends to all others."""

    problem: str | TypeError | None
    config_fields: list[tuple[str, str]]

    def encode(self) -> bytes:
        is_type = isinstance(self.problem, TypeError)
        problem = None if not self.problem else str(self.problem)
        encoded = json.dumps([problem, is_type, self.config_fields]).encode()
        if len(encoded) > _MAX_BYTES:  # an error on all ranks, as a length above it would be
            what = f"config fields must be at most {_MAX_BYTES} bytes as JSON, got {len(encoded)}"
            return _Arguments(what, []).encode()
        return encoded


def _decode(encoded: bytes) -> _Arguments:
    """Return what ``encode`` encoded; a ValueError if it did not."""
    try:
        problem, is_type, fields = json.loads(encoded)
        pairs = [(name, value) for name, value in fields]
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    texts = [text for pair in pairs for text in pair] + ([] if problem is None else [problem])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("something else than text")
    return _Arguments(TypeError(problem) if problem and is_type else problem, pairs)


def _all_gather(own: _Arguments, process_group: dist.ProcessGroup | None) -> list[_Arguments]:
    """Return the arguments of all ranks: their lengths are sent first, and are bounded."""
    if dist.get_world_size(process_group) == 1:
        return [own]
    store_of(None).get("connect")  # now, as the process that hosts it may be gone when it is needed
    encoded, device = own.encode(), device_of(process_group)
    lengths = _rows(torch.tensor([len(encoded)], device=device), process_group)[:, 0].tolist()
    for peer, length in enumerate(lengths):
        if not 0 < length <= _MAX_BYTES:
            raise _bad_message(peer, f"a length of {length}, not 1 to {_MAX_BYTES}")
    padded = torch.frombuffer(bytearray(encoded.ljust(max(lengths))), dtype=torch.uint8)
    rows = _rows(padded.to(device), process_group).cpu()
    gathered = []
    for peer, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        try:
            gathered.append(_decode(row[:length].numpy().tobytes()))
        except ValueError as error:
            raise _bad_message(peer, f"something else ({error})") from error
    return gathered


def _rows(row: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows (n,) of all ranks as (number of ranks, n)."""
    gathered = row.new_empty(dist.get_world_size(process_group) * row.numel())
    try:
        _gather(gathered, row, group=process_group)
    except RuntimeError as error:
        what = "the comparison of all ranks' arguments failed"
        raise peer_error(process_group, None, what, error) from error
    return gathered.view(-1, row.numel())


def _bad_message(peer: int, what: str) -> PeerError:
    return PeerError(
        f"rank {dist.get_rank()}: all ranks must send their config fields as JSON, got from rank "
        f"{peer} of the group {what}; do all ranks make the same calls, with the same version of "
        "pyparallel?"
    )


def error_of(problems: Mapping[int, str | TypeError]) -> DisagreementError:
    """Return the error of all ranks' problems, by rank: each sentence once, with its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problem in problems.items():
        ranks_of.setdefault(str(problem), []).append(rank)
    text = "; ".join(f"{_name(ranks)}: {sentence}" for sentence, ranks in ranks_of.items())
    are_types = all(isinstance(problem, TypeError) for problem in problems.values())
    return ArgumentTypeError(text) if are_types else DisagreementError(text)


def _name(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5" for ascending ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def first_difference(
    left: list[tuple[str, str]], right: list[tuple[str, str]]
) -> tuple[str, str, str] | None:
    """Return the name and both values of the first field that differs, or None."""
    for (name, value), (other_name, other_value) in zip(left, right, strict=False):
        if name != other_name:
            return "names", name, other_name
        if value != other_value:
            return name, value, other_value
    if len(left) != len(right):
        return "number of fields", str(len(left)), str(len(right))
    return None
