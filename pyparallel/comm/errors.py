"""Errors of communication between ranks, and the places that they name."""

import weakref
from typing import Any, TypeVar

import torch.distributed as dist

Error = TypeVar("Error", bound=RuntimeError)

# Of the groups of each trainer that is not closed, its number and the name of its first group.
_trainers: "weakref.WeakKeyDictionary[Any, tuple[int, str]]" = weakref.WeakKeyDictionary()


class PeerError(RuntimeError):
    """Communication failed; names the rank, the step and what failed.

    Attributes:
        failed: the global ranks that were found to have failed.
        how: what they did, such as "died, or ended without this call": the same on all ranks.
    """

    failed: tuple[int, ...] = ()
    how = ""


class RemoteError(RuntimeError):
    """An error on another rank; the message is that rank's own."""


class NonFiniteError(RuntimeError):
    """A gradient with a nan or an inf; names the rank and, where it is known, the parameter."""


def without_traceback(error: Error) -> Error:
    """Return a copy of an error, to be raised again later.

    An error that has been raised references the frames it has passed, and so the trainer and its
    process groups, for as long as it is kept.
    """
    return type(error)(*error.args)


def place_of(rank: int, step: int | None, trainer: int | None = None) -> str:
    """Return "rank 0, trainer 1, step 12", without a trainer or a step that is None."""
    parts = {"rank": rank, "trainer": trainer, "step": step}
    return ", ".join(f"{name} {number}" for name, number in parts.items() if number is not None)


def next_trainer_number() -> int:
    """Return the number of this process's next trainer; ranks take the largest."""
    return max((number for number, _ in _trainers.values()), default=-1) + 1


def register_trainer(process_group: dist.ProcessGroup, number: int) -> None:
    """Note that a group is the first one of a trainer with this number."""
    _trainers[process_group] = number, process_group.group_name


def register_child(process_group: dist.ProcessGroup, parent: dist.ProcessGroup) -> None:
    """Note that a group was created within another one: it is the same trainer's."""
    if parent in _trainers:
        _trainers[process_group] = _trainers[parent]


def forget_trainer(process_group: dist.ProcessGroup | None) -> None:
    """Stop to count the trainer of a group, which is closed."""
    number = trainer_of(process_group)
    for group in [each for each, (its_number, _) in _trainers.items() if its_number == number]:
        del _trainers[group]


def trainer_of(process_group: dist.ProcessGroup | None) -> int | None:
    """Return the number of the trainer whose group this is; None: not a trainer's group.

    Trainers are numbered in the order of their creation, equally on all ranks of a trainer.
    """
    known = None if process_group is None else _trainers.get(process_group)
    return None if known is None else known[0]


def trainer_to_name(process_group: dist.ProcessGroup | None) -> int | None:
    """Return the number of a group's trainer for errors; None if the process has no other one."""
    numbers = {number for number, _ in _trainers.values()}
    return trainer_of(process_group) if len(numbers) > 1 else None


def first_group_of(process_group: dist.ProcessGroup) -> str:
    """Return the name of the first group of a group's trainer; of the group if it has none."""
    known = _trainers.get(process_group)
    return str(process_group.group_name if known is None else known[1])
