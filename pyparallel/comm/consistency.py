"""Consistency checks across ranks, so that a wrong argument on one rank never ends in a hang."""

from collections.abc import Sequence

import torch.distributed as dist

from .errors import peer_error


class DisagreementError(ValueError):
    """An invalid argument on one rank, or one that differs; all ranks raise the same text."""


def check_consistent_across_ranks(
    config_fields: Sequence[tuple[str, str]],
    problem: str | None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Raise the same error on all ranks if any has a problem or their configurations differ.

    Every rank of the group must call this, also one that has a problem: it must not raise alone.

    Args:
        config_fields: (name, value), in the same order on all ranks.
        problem: error message of this rank, or None.
        process_group: None: the default group.

    Raises:
        DisagreementError: names the rank and its problem, or the first field that differs.
        PeerError: a rank died or did not call this within the process group's timeout.
    """
    own = (problem, list(config_fields))
    gathered: list[tuple[str | None, list[tuple[str, str]]]] = [own]
    if dist.get_world_size(process_group) > 1:
        gathered = [own] * dist.get_world_size(process_group)
        try:
            dist.all_gather_object(gathered, own, group=process_group)
        except RuntimeError as error:
            what = "the comparison of all ranks' arguments failed"
            raise peer_error(dist.get_rank(), None, what, error) from error
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(gathered) if text]
    if problems:
        raise DisagreementError("; ".join(problems))
    for rank, (_, fields) in enumerate(gathered):
        difference = first_difference(gathered[0][1], fields)
        if difference:
            raise DisagreementError(
                f"all ranks must have the same {difference[0]}, got {difference[1]} on rank 0 "
                f"and {difference[2]} on rank {rank}"
            )


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
