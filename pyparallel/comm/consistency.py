"""Consistency checks across ranks, so that a wrong argument on one rank never ends in a hang."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from .errors import peer_error


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
    own = (problem, list(config_fields))
    gathered: list[tuple[str | TypeError | None, list[tuple[str, str]]]] = [own]
    if dist.get_world_size(process_group) > 1:
        gathered = [own] * dist.get_world_size(process_group)
        try:
            dist.all_gather_object(gathered, own, group=process_group)
        except RuntimeError as error:
            what = "the comparison of all ranks' arguments failed"
            raise peer_error(dist.get_rank(), None, what, error) from error
    problems = {rank: each for rank, (each, _) in enumerate(gathered) if each}
    if problems:
        raise error_of(problems)
    for rank, (_, fields) in enumerate(gathered):
        difference = first_difference(gathered[0][1], fields)
        if difference:
            raise DisagreementError(
                f"all ranks must have the same {difference[0]}, got {difference[1]} on rank 0 "
                f"and {difference[2]} on rank {rank}"
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
