"""The life cycle that all trainers share."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch.distributed as dist
from torch.optim import Optimizer

from ..comm import Run, StepCounts

# The trainer that steps each optimizer.
_owners: "weakref.WeakKeyDictionary[Optimizer, weakref.ref[Trainer]]"
_owners = weakref.WeakKeyDictionary()


class Trainer:
    """What is opened with a run of its own on all ranks together, used, and closed; never copied.

    A subclass calls ``_open_run`` once in its constructor, after the ranks have agreed on their
    arguments, and ``_own`` for the optimizers that it steps.
    """

    _copy_instead: ClassVar[str]  # what errors advise
    _opened: Run | None = None

    def _open_run(
        self,
        process_group: dist.ProcessGroup | None,
        counts: StepCounts | None = None,
        replica_group: dist.ProcessGroup | None = None,
    ) -> Run:
        """Open the trainer's run, as ``Run.open``; all ranks call this together."""
        self._opened = Run.open(process_group, counts, replica_group)
        return self._opened

    @property
    def _run(self) -> Run:
        """Return the run; raise a RuntimeError if the trainer is closed."""
        self._check_open()
        assert self._opened is not None
        return self._opened

    @property
    def is_open(self) -> bool:
        """Whether ``close`` was not called."""
        return self._opened is not None

    def _check_open(self) -> None:
        if not self.is_open:
            raise RuntimeError(f"{type(self).__name__} must not be used after close()")

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for training, without the full model and checks."""
        return round(self._run.stats.wire_bytes)

    def _own(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            _owners[optimizer] = weakref.ref(self)

    def close(self) -> None:
        """End the run; the optimizers are free for another trainer. A second call does nothing."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        for optimizer in [each for each, owner in _owners.items() if owner() is self]:
            del _owners[optimizer]

    def __deepcopy__(self, memo: Any) -> Any:
        name = type(self).__name__
        raise TypeError(f"{name} must not be copied or pickled: {self._copy_instead}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(None)


@contextmanager
def raising_on_all_ranks(
    agree: Callable[[list[tuple[str, str]], str | None], None], what: str = ""
) -> Iterator[list[tuple[str, str]]]:
    """Raise an error inside on all ranks, after ``what``; yield fields that ``agree`` compares."""
    problem, cause = None, None
    fields: list[tuple[str, str]] = []
    try:
        yield fields
    except Exception as error:  # perhaps on one rank only, while the others wait for it
        # It is raised as a ValueError; of a user's function, as `what` says, the type is told too.
        is_own = isinstance(error, ValueError) and not what
        kind = "" if is_own else f"{type(error).__name__}: "
        problem, cause = f"{what}{kind}{error}", error
    try:
        agree([] if problem else fields, problem)
    except ValueError as error:
        raise error from cause


def find_owner_error(optimizers: Iterable[object]) -> str | None:
    """Return why an optimizer cannot be taken by a new trainer, or None."""
    for optimizer in optimizers:
        reference = _owners.get(optimizer) if isinstance(optimizer, Optimizer) else None
        owner = reference and reference()
        if owner is not None:
            return (
                f"an optimizer must be stepped by one trainer, got {type(optimizer).__name__}, "
                f"which a {type(owner).__name__} steps: close() that trainer first, or create "
                "another optimizer"
            )
    return None
