"""Finding out together whether every rank may go on, so that a mistake never ends in a hang."""

from collections.abc import Sequence

import torch.distributed as dist


class DisagreementError(ValueError):
    """What one rank found wrong, or where ranks differ; every rank raises the same sentence."""


def check_consistent_across_ranks(
    config_fields: Sequence[tuple[str, str]],
    problem: str | None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Raise the same error on all ranks unless none has a problem and all state the same facts.

    Every rank of the group must call this, also the one with the problem: it must not raise alone.

    Args:
        config_fields: (name, value), in the same order on all ranks.
        problem: what this rank cannot go on with, as a sentence; None where there is nothing.
        process_group: None means the default group.

    Raises:
        DisagreementError: naming the rank and its problem, or the first fact that differs.
    """
    own = (problem, list(config_fields))
    gathered: list[tuple[str | None, list[tuple[str, str]]]] = [own]
    if dist.get_world_size(process_group) > 1:
        gathered = [own] * dist.get_world_size(process_group)
        dist.all_gather_object(gathered, own, group=process_group)
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
    """The name of the first fact that differs, and its two values; None where none does."""
    for (name, value), (other_name, other_value) in zip(left, right, strict=False):
        if name != other_name:
            return "names", name, other_name
        if value != other_value:
            return name, value, other_value
    if len(left) != len(right):
        return "number of facts", str(len(left)), str(len(right))
    return None
