"""The functions of the package that a value passes in a step, traced on gloo ranks.

``python -m tests.hops`` prints three ways as trees: of a bucket of parameters that SGP averages, of
a microbatch on the middle one of three stages, and of a bucket of gradients that DDP averages in
int8 with error feedback. ``python -m tests.house`` counts them.

A function is on the way of a value if it is called at least once more in a step that has one value
more: what is called once a step, however many buckets there are, is not. Comprehensions are a part
of their function, and an op is one function, whatever it calls. An object with state is one that
lives from step to step and is the ``self`` of functions called in each, frozen dataclasses aside.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.workers import run_ranks

PACKAGE = Path(__file__).resolve().parents[1] / "pyparallel"
_WARM_UP = 11  # steps: targets are compared in the first ten, and DDP builds its buckets again
_FEW, _MANY = 1, 3
_SIZE = 600  # a matrix of as many rows and columns has more bytes than a bucket of 1 MiB
Step = Callable[[], object]


class Call(NamedTuple):
    """A call of a function: its file in the package, its name, and how many callers it has."""

    file: str
    name: str
    depth: int


class Tracer:
    """Records calls of the functions of a folder, of this thread and of those started since."""

    def __init__(self, folder: Path = PACKAGE) -> None:
        self._folder = f"{folder}/"
        self._ops = f"{folder}/ops/"
        self._records = False
        self.calls: list[Call] = []  # of the last step
        self._selves: dict[int, Any] = {}  # of it; it keeps them, so that no id is used again
        self._kept: list[Any] = []  # those of the step before, too
        threading.setprofile(self._see)

    def record(self, step: Step) -> None:
        """Call a step, and record what it calls."""
        before, self._selves, self.calls = self._selves, {}, []
        self._records = True
        sys.setprofile(self._see)
        try:
            step()
        finally:
            sys.setprofile(None)
            self._records = False
        self._kept = [value for key, value in self._selves.items() if key in before]

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self._records or not self._has(frame.f_code):
            return
        depth, caller = 0, frame.f_back
        while caller is not None:
            if caller.f_code.co_filename.startswith(self._ops):
                return
            depth += self._has(caller.f_code)
            caller = caller.f_back
        code = frame.f_code
        self.calls.append(Call(code.co_filename[len(self._folder) :], code.co_qualname, depth))
        if code.co_varnames[:1] == ("self",) and "self" in frame.f_locals:
            value = frame.f_locals["self"]
            self._selves[id(value)] = value

    def _has(self, code: CodeType) -> bool:
        """Whether code is a function of the folder; a comprehension belongs to its function."""
        return code.co_filename.startswith(self._folder) and not code.co_name.endswith(
            ("comp>", "genexpr>")
        )

    def objects(self) -> list[str]:
        """Return the classes of the objects with state, one entry for each object."""
        found = []
        for value in self._kept:
            parameters = getattr(type(value), "__dataclass_params__", None)
            if parameters is None or not parameters.frozen:
                found.append(type(value).__qualname__)
        return sorted(found)


def find_way(few: Sequence[Call], many: Sequence[Call], num_more: int) -> list[Call]:
    """Return the first call of each function that ``many`` has at least ``num_more`` times more."""
    before, after = (Counter(each[:2] for each in calls) for calls in (few, many))
    firsts: dict[tuple[str, str], Call] = {}
    for each in many:
        if after[each[:2]] - before[each[:2]] >= num_more:
            firsts.setdefault(each[:2], each)
    return list(firsts.values())


def gossip(num_buckets: int) -> Step:
    from pyparallel.gossip import SGP, GossipDataParallel

    model = _model(num_buckets)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    return _train(GossipDataParallel(model, optimizer, SGP(), bucket_cap_mb=1), optimizer)


def pipeline(num_microbatches: int) -> Step:
    from pyparallel.pipeline import PipelineTrainer

    trainer = PipelineTrainer(
        [nn.Linear(4, 4) for _ in range(dist.get_world_size())],
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        num_microbatches=num_microbatches,
        split=range(1, dist.get_world_size()),
    )
    batch = torch.ones(2 * num_microbatches, 4)
    return lambda: trainer.step(batch, batch)


def hook(num_buckets: int) -> Step:
    from pyparallel.compression import ErrorFeedback, Int8, compress_ddp

    ddp = nn.parallel.DistributedDataParallel(_model(num_buckets), bucket_cap_mb=1)
    compress_ddp(ddp, ErrorFeedback(Int8()))
    return _train(ddp, torch.optim.SGD(ddp.parameters(), lr=1e-5))


def _model(num_buckets: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(_SIZE, _SIZE, bias=False) for _ in range(num_buckets)))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, _SIZE)).sum().backward()
        optimizer.step()

    return step


# What makes a step of some values, on how many ranks, and the rank that is traced.
WAYS: dict[str, tuple[Callable[[int], Step], int, int]] = {
    "gossip bucket": (gossip, 2, 0),
    "microbatch": (pipeline, 3, 1),
    "DDP bucket": (hook, 2, 0),
}


class Traced(NamedTuple):
    """The way of a value, all calls of a step of one value, and its objects with state."""

    way: list[Call]
    calls: list[Call]
    objects: list[str]


def trace(value: str) -> Traced:
    """Trace steps of a value of `WAYS`, on ranks of their own."""
    make, num_ranks, rank = WAYS[value]
    few, many = run_ranks(num_ranks, _trace_rank, make)[rank]
    return Traced(find_way(few[0], many[0], _MANY - _FEW), *few)


def _trace_rank(rank: int, make: Callable[[int], Step]) -> list[tuple[list[Call], list[str]]]:
    traces = []
    for num_values in (_FEW, _MANY):
        tracer = Tracer()
        step = make(num_values)
        for _ in range(_WARM_UP):
            step()
        tracer.record(step)
        tracer.record(step)
        traces.append((tracer.calls, tracer.objects()))
    return traces


def count(traced: dict[str, Traced]) -> dict[str, int]:
    """Return the counts that `tests.house` limits, of traces of all `WAYS`."""
    counts = {f"functions that a {value} passes": len(traced[value].way) for value in WAYS}
    return counts | {"objects with state in an SGP step": len(traced["gossip bucket"].objects)}


def main() -> None:
    """Print the ways."""
    for value in WAYS:
        traced = trace(value)
        print(f"\n{value}: {len(traced.way)} functions")
        for each in traced.way:
            print(f"{'  ' * each.depth}{each.name}  {each.file}")
        print(f"{len(traced.objects)} objects with state: {', '.join(traced.objects)}")


if __name__ == "__main__":
    main()
