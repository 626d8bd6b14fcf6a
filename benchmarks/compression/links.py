"""Seconds per step of DistributedDataParallel on a link, by way of averaging gradients."""

import traceback
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.compression.systems import BUCKET_MB, CASTS, SYSTEMS, System
from benchmarks.harness.link import read_sent
from benchmarks.harness.turns import time_blocks
from benchmarks.pipeline.models import ByteModel
from benchmarks.pipeline.systems import Plan
from pyparallel.planning.recommend import Workload, benchmark_ranks

WARM_UP = 4  # steps: buckets are rebuilt after the first, torch's PowerSGD starts in the third
COUNTED = 2  # steps whose bytes on the link are counted


@dataclass(frozen=True)
class Speed:
    """Measurements of one system, on the slowest rank."""

    # Per step in each repetition; empty: it does not run here
    seconds: list[float] = field(default_factory=list)
    # Per step, sent by rank 0 according to the link's counter, headers included
    wire_bytes: float = 0.0
    payload_bytes: int | None = None  # of rank 0's messages in a step; None: unknown
    problem: str = ""  # why it does not run
    # Seconds per step, by ``python -m pyparallel recommend``; None: not supported
    predicted: float | None = None


class Training:
    """A user's training loop."""

    def __init__(self, model: ByteModel, system: System) -> None:
        module = nn.Sequential(*model.build())
        self._loss = model.loss
        self._batch = model.make_batch(1)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        self._module, self.last_step = system.wrap(module)

    def step(self) -> float:
        inputs, target = self._batch
        self._optimizer.zero_grad()
        loss = self._loss(self._module(inputs), target)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def finish(self) -> None:
        """Do nothing: a step is complete when it returns."""


def measure(rank: int, model: ByteModel, plan: Plan) -> dict[str, Speed]:
    predictions = predict(model)
    speeds: dict[str, Speed] = {}
    trainings: dict[str, Training] = {}
    for system in SYSTEMS:
        started = start(model, system)
        if isinstance(started, str):
            speeds[system.name] = Speed(problem=started)
        else:
            trainings[system.name] = started
    for name, seconds in time_blocks(trainings, plan.turns, plan.steps(1)).items():
        sent = trainings[name].last_step()
        wire_bytes = count_sent(trainings[name])
        payload_bytes = None if sent is None else sent.payload_bytes
        speeds[name] = Speed(seconds, wire_bytes, payload_bytes, predicted=predictions.get(name))
    return {system.name: speeds[system.name] for system in SYSTEMS}


def measure_casts(rank: int, model: ByteModel, plan: Plan) -> dict[str, list[float]]:
    trainings = {system.name: warm(model, system) for system in CASTS}
    return time_blocks(trainings, plan.turns, plan.steps(1))


def predict(model: ByteModel) -> dict[str, float]:
    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = batch
        return model.loss(module(inputs), target)

    module = nn.Sequential(*model.build())
    bucket_bytes = BUCKET_MB * 2**20  # of the first bucket, too
    workload = Workload(module, model.make_batch(1), loss, (bucket_bytes, bucket_bytes))
    predictions = benchmark_ranks(workload, torch.device("cpu")).predictions
    return {prediction.name: prediction.step for prediction in predictions}


def start(model: ByteModel, system: System) -> Training | str:
    """Start and warm up; return the error of a torch hook that fails on some rank."""
    if not system.may_fail:
        return warm(model, system)
    problem = ""
    try:
        training = warm(model, system)
    except Exception as error:  # any error is reported
        problem = describe(error)
    problems: list[str] = ["" for _ in range(dist.get_world_size())]
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), None) or training


def describe(error: Exception) -> str:
    """Return the first line of an error, or where it was raised if it has no text."""
    place = traceback.extract_tb(error.__traceback__)[-1].name
    sentence = str(error).split("running the callback: ")[-1].split("\n")[0] or f"in {place}"
    return f"{type(error).__name__}: {sentence}"


def warm(model: ByteModel, system: System) -> Training:
    training = Training(model, system)
    for _ in range(WARM_UP):
        training.step()
    return training


def count_sent(training: Training) -> float:
    dist.barrier()
    before = read_sent()
    for _ in range(COUNTED):
        training.step()
    sent = read_sent() - before
    dist.barrier()
    return sent / COUNTED
