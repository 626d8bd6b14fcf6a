"""A short training that stops, is saved and goes on: how its state is made, and read again."""

import copy
import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

BEFORE, AFTER = range(5), range(5, 9)
"""The steps until a run is saved, and those that follow."""

Result = dict[str, list]
"""What a run has come to: numbers by name. A list holds every bit of a float32."""


class Run(Protocol):
    """A training on one rank."""

    def train(self, steps: Sequence[int]) -> None:
        """Take these steps: what a batch holds follows from the rank and the step alone."""

    def pause(self) -> None:
        """What a user calls before a state can be saved; a run that is not saved calls it too."""

    def save(self) -> Any:
        """All that a user would save of this rank."""

    def load(self, saved: Any, way: int) -> None:
        """Go on from what was saved, in one of the job's ways: all must come to the same."""

    def load_others(self, saved: Any) -> None:
        """Load what was saved, but for what pyparallel itself remembers."""

    def finish(self) -> Result:
        """End the training; what it has come to since it was loaded."""


@dataclass(frozen=True)
class Job:
    """How a run begins, and what to expect of it.

    Args:
        start: begins a run; called by all ranks together.
        remembers: whether pyparallel remembers anything that the next steps depend on.
        repeats: whether two runs are equal; else only what is loaded is.
        ways: in how many ways what was saved can be loaded.
        exact: whether the steps compute the same bits on every CPU. Else those of another CPU than
            the file was written on are compared up to rounding: libraries choose by the CPU how
            they take square roots and multiply matrices.
    """

    start: Callable[[], Run]
    remembers: bool = True
    repeats: bool = True
    ways: int = 1
    exact: bool = True


@dataclass(frozen=True)
class Recorded:
    """What one rank has made of a job: its state as a file's bytes, and what a run comes to."""

    state: bytes
    expected: Result


def record(job: Job) -> Recorded:
    """Train, save, go on; make sure that the state is worth keeping.

    Raises:
        AssertionError: on every rank alike: a run that goes on is not the one that never stopped,
            or nothing in the state makes a difference.
    """
    run = job.start()
    run.train(BEFORE)
    run.pause()
    state = to_bytes(run.save())
    run.train(AFTER)
    went_on = run.finish()
    resumed = [go_on(job, from_bytes(state), way) for way in range(job.ways)]
    straight = _train_straight(job) if job.repeats else None
    expected = resumed[0] if straight is None else {**resumed[0], **_after(straight, resumed[0])}
    same = all(each == expected for each in resumed)
    if job.repeats:
        same = same and _after(went_on, expected) == expected
    _agree(same, "a run that was saved must go on as the one that never stopped")
    differs = any_rank(go_on_without(job, from_bytes(state)) != expected)
    _agree(differs == job.remembers, f"remembers must be {differs}")
    return Recorded(state, expected)


def go_on(job: Job, state: Any, way: int) -> Result:
    """What a new run comes to that is loaded in this way."""
    run = job.start()
    run.load(copy.deepcopy(state), way)  # optimizers take tensors over, and write them
    run.train(AFTER)
    return run.finish()


def go_on_without(job: Job, state: Any) -> Result:
    """What a new run comes to that lacks what pyparallel remembers."""
    run = job.start()
    run.load_others(copy.deepcopy(state))
    run.train(AFTER)
    return run.finish()


def differences(got: Result, expected: Result, *, exact: bool) -> list[str]:
    """Names under which two results differ, or by more than rounding, with their numbers."""
    if got.keys() != expected.keys():
        return [f"expected {sorted(expected)}, got {sorted(got)}"]
    same = torch.equal if exact else _close
    return [
        f"{name}: expected {expected[name]}, got {got[name]}"
        for name in expected
        if not same(*(torch.tensor(each[name], dtype=torch.float64) for each in (got, expected)))
    ]


def any_rank(yes: bool) -> bool:
    """Whether it is so on any rank."""
    return max(_of_all_ranks(yes)) == 1


def this_cpu() -> str:
    """What libraries may choose by: its name, and a number of all that it can do."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    flags = " ".join(sorted(facts.get("flags", "").split()))
    return f"{facts.get('model name')} {zlib.crc32(flags.encode()):08x}"


def to_bytes(state: Any) -> bytes:
    """As a user's file."""
    file = io.BytesIO()
    torch.save(copy.deepcopy(state), file)
    return file.getvalue()


def from_bytes(content: bytes) -> Any:
    """As a user loads it."""
    return torch.load(io.BytesIO(content), weights_only=True)


def listed(tensors: Mapping[str, Tensor]) -> Result:
    """Numbers by name."""
    return {name: tensor.detach().double().tolist() for name, tensor in tensors.items()}


def _train_straight(job: Job) -> Result:
    run = job.start()
    run.train(BEFORE)
    run.pause()
    run.train(AFTER)
    return run.finish()


def _after(whole: Result, part: Result) -> Result:
    """Of a result the end of each list of losses, as of a run that was loaded."""
    return {
        name: values[len(values) - len(part[name]) :] if name.endswith("losses") else values
        for name, values in whole.items()
    }


def _close(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-5)


def _agree(fine: bool, sentence: str) -> None:
    wrong = [rank for rank, yes in enumerate(_of_all_ranks(fine)) if not yes]
    assert not wrong, f"{sentence}, got ranks {wrong}"


def _of_all_ranks(yes: bool) -> list[int]:
    mine = torch.tensor([int(yes)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [int(each) for each in everyone]
