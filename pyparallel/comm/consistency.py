"""Consistency checks across ranks, so that a wrong argument on one rank never ends in a hang.

Ranks exchange JSON and never objects of Python: unpickling runs what another rank has sent.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .counts import ANY, MASS, NUM_FIELDS, Call, describe_call, to_device
from .errors import PeerError, name_ranks
from .failures import peer_error
from .process_groups import device_of
from .store import store_of
from .waiting import Waiting

# torch before 2.13 has the second name.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MAX_BYTES = 2**26  # of what one rank sends: the config fields of about 600,000 tensors


class DisagreementError(ValueError):
    """An invalid argument on one rank, or one that differs; all ranks raise the same text."""


class ArgumentTypeError(DisagreementError, TypeError):
    """An argument of a wrong type; all ranks raise the same text."""


def check_consistent_across_ranks(
    config_fields: Sequence[tuple[str, str]],
    problem: str | TypeError | None,
    process_group: dist.ProcessGroup | None = None,
    call: Call = Call.ARGUMENTS,
    replica_group: dist.ProcessGroup | None = None,
) -> None:
    """Raise the same error on all ranks if any has a problem or their configurations differ.

    Every rank of the group must call this, also one that has a problem: it must not raise alone.
    With a ``replica_group`` an error is also raised on its ranks, whose groups are others.

    Fields are (name, value), in the same order on all ranks. A DisagreementError names the ranks
    and their problem, the first field that differs, or what another rank calls instead; it is an
    ArgumentTypeError if every problem is a TypeError. A PeerError: a rank died or did not call this
    within the process group's timeout.
    """
    error: DisagreementError | None = None
    try:
        _check_in_group(config_fields, problem, process_group, call)
    except DisagreementError as found:
        error = found
    if replica_group is not None:
        is_type = isinstance(error, ArgumentTypeError)
        mine = [None if error is None else str(error), is_type]
        rows = gather_json(mine, replica_group, "errors", "arguments", _parse_error, call)
        error = next((row for row in rows if row is not None), None)
    if error is not None:
        raise error


def _parse_error(sent: Any) -> DisagreementError | None:
    """Return the error that a rank has sent; a TypeError or a ValueError if it sent another."""
    text, is_type = sent
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError("something else than text")
    return ArgumentTypeError(text) if is_type else DisagreementError(text)


def _check_in_group(
    config_fields: Sequence[tuple[str, str]],
    problem: str | TypeError | None,
    process_group: dist.ProcessGroup | None,
    call: Call,
) -> None:
    fields = [(str(name), str(value)) for name, value in config_fields]
    text = str(problem) if problem else None
    own = [text, isinstance(problem, TypeError), fields]
    if (num_bytes := len(json.dumps(own))) > _MAX_BYTES:  # an error on all ranks, with a reason
        text = f"config fields must be at most {_MAX_BYTES} bytes as JSON, got {num_bytes}"
        own = [text, False, []]
    gathered = gather_json(own, process_group, "config fields", "arguments", _parse_fields, call)
    if problems := {rank: each for rank, (each, _) in enumerate(gathered) if each}:
        raise error_of(problems)
    for rank, (_, others) in enumerate(gathered):
        if difference := first_difference(gathered[0][1], others):
            raise DisagreementError(
                f"all ranks must have the same {difference[0]}, got {difference[1]} on rank 0 "
                f"and {difference[2]} on rank {rank}"
            )


def _parse_fields(sent: Any) -> tuple[str | TypeError | None, list[tuple[str, str]]]:
    """Return a rank's problem and fields; a TypeError or a ValueError if it sent another thing."""
    problem, is_type, fields = sent
    pairs = [(name, value) for name, value in fields]
    texts = [text for pair in pairs for text in pair] + ([] if problem is None else [problem])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("something else than text")
    return TypeError(problem) if problem and is_type else problem, pairs


def gather_json(
    value: Any,
    process_group: dist.ProcessGroup | None,
    content: str,
    subject: str | None,
    parse: Callable[[Any], Any] = lambda sent: sent,
    call: Call = Call.ARGUMENTS,
) -> list[Any]:
    """Return a value, of JSON's types, of every rank of the group, all of which call this.

    Errors name the ``content`` that ranks send and the ``subject`` that they compare. ``parse``
    converts the value of each rank, or raises a TypeError or a ValueError. A PeerError is of a rank
    that died, did not call this, or sent something else, or more than 64 MiB. ``subject`` None: of
    a rank that died the error is torch's own, and no store is asked.
    """
    encoded = json.dumps(value).encode()
    if dist.get_world_size(process_group) == 1:
        return [parse(json.loads(encoded))]
    if subject:  # now, as the process that hosts the store may be gone when it is needed
        store_of(None).get("connect")
    device = device_of(process_group)
    place = f"rank {dist.get_rank()}"

    def bad_message(peer: int, what: str) -> PeerError:
        return PeerError(
            f"{place}: all ranks must send their {content} as JSON, got from rank {peer} of the "
            f"group {what}; do all ranks make the same calls, with the same version of pyparallel?"
        )

    try:
        with Waiting(process_group):
            rows = gather_rows(row_of_call(call, [len(encoded)], device), process_group).tolist()
        check_same_call(rows, {call}, process_group)
        lengths = [row[MASS + 1] for row in rows]
        for peer, length in enumerate(lengths):
            if not 0 < length <= _MAX_BYTES:
                raise bad_message(peer, f"a length of {length:.0f}, not 1 to {_MAX_BYTES}")
        padded = torch.frombuffer(bytearray(encoded.ljust(int(max(lengths)))), dtype=torch.uint8)
        texts = gather_rows(padded.to(device), process_group).cpu()
    except RuntimeError as error:
        if not subject:
            raise
        what = f"the comparison of all ranks' {subject} failed"
        raise peer_error(process_group, place, what, error) from error
    gathered = []
    for peer, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        try:
            gathered.append(parse(json.loads(text[: int(length)].numpy().tobytes())))
        except (ValueError, TypeError, RecursionError) as error:
            raise bad_message(peer, f"something else ({error})") from error
    return gathered


def row_of_call(call: Call, numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return what a call sends first, up to 7 numbers: (8,) float64, as an average's row."""
    return to_device([call, *numbers, *[ANY] * (NUM_FIELDS - 1 - len(numbers))], device)


def check_same_call(
    rows: Sequence[Sequence[float]], calls: Set[float], process_group: dist.ProcessGroup | None
) -> None:
    """Raise a DisagreementError, the same on all ranks, if a row is not of one of some calls."""
    for index, row in enumerate(rows):
        if row[MASS] != rows[0][MASS] and not {row[MASS], rows[0][MASS]} <= calls:
            group: Any = process_group or dist.group.WORLD
            first, other = (dist.get_global_rank(group, each) for each in (0, index))
            raise DisagreementError(
                f"all ranks must make the same call, got {describe_call(rows[0])} on rank {first} "
                f"and {describe_call(row)} on rank {other}; nothing was loaded or averaged"
            )


def gather_rows(row: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows (n,) of all ranks as (number of ranks, n)."""
    gathered = row.new_empty(dist.get_world_size(process_group) * row.numel())
    all_gather_single(gathered, row, group=process_group)
    return gathered.view(-1, row.numel())


def error_of(problems: Mapping[int, str | TypeError]) -> DisagreementError:
    """Return the error of all ranks' problems, by rank: each sentence once, with its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problem in problems.items():
        ranks_of.setdefault(str(problem), []).append(rank)
    text = "; ".join(f"{name_ranks(ranks)}: {sentence}" for sentence, ranks in ranks_of.items())
    are_types = all(isinstance(problem, TypeError) for problem in problems.values())
    return ArgumentTypeError(text) if are_types else DisagreementError(text)


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
