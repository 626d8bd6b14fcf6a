"""A step on a GPU: the host waits once where it flushes or the optimizer skips, else per loss."""

from importlib import import_module
from itertools import cycle

import pytest
import torch
from torch import nn

from pyparallel import optim
from pyparallel.pipeline import Interlocking, LinearHead, PipelineTrainer, schedules
from pyparallel.pipeline import build as pipeline_build
from pyparallel.pipeline.prediction.flat_predictor import FlatWeightPredictor
from pyparallel.pipeline.runtime import loss, loss_weights
from pyparallel.pipeline.schedules.schedule import Flushing
from pyparallel.pipeline.schedules.streaming import Streaming
from tests.cases import slow
from tests.pipeline.every_schedule import one_of_each_kind
from tests.pipeline.models import as_on_gpus

HEADS = tuple(LinearHead(4) for _ in range(3))
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "pyparallel.optim.AdamW": lambda parameters: optim.AdamW(parameters, lr=0.1),
    "pyparallel.optim.SGD": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
}
LOSSES = "losses"
ON_DEVICE = "fused AdamW", "pyparallel.optim.AdamW", "pyparallel.optim.SGD"


def build(schedule, optimizer_fn, device, **options):
    layers = [nn.Linear(4, 4, device=device) for _ in range(4)]
    return PipelineTrainer(
        layers, nn.functional.mse_loss, optimizer_fn, schedule,
        num_microbatches=4, split=(1, 2, 3), **options,
    )  # fmt: skip


@pytest.fixture
def reads(monkeypatch):
    """Reads of losses on the host, on the meta device, where any other read of a tensor raises."""
    found = []

    def host_values(*copies):
        found.append(LOSSES)
        return [1.0] * sum(each._tensor.numel() for each in copies)

    for module in (loss, loss_weights):
        monkeypatch.setattr(module, "host_values", host_values)
    # Torch's fused optimizers have kernels for this device, too.
    monkeypatch.setattr(
        import_module("torch.optim.adam"), "_device_dtype_check_for_fused", lambda *_: None
    )
    monkeypatch.setattr(pipeline_build, "check_memory", lambda *_: None)
    monkeypatch.setattr(FlatWeightPredictor, "_num_steps", lambda *_: found.append("step") or 1.0)
    return found


def test_the_host_reads_losses_alone_and_once_a_step_where_it_can(reads, subtests):
    batch = torch.empty(8, 4, device="meta")
    every = [*one_of_each_kind(schedules.EVERY_SCHEDULE), Interlocking(2, HEADS)]
    for schedule, name in zip(every, cycle(OPTIMIZERS), strict=False):
        with subtests.test(schedule=schedule, optimizer=name):
            clipped = {} if isinstance(schedule, Interlocking) else {"max_norm": 1.0}
            trainer = build(schedule, OPTIMIZERS[name], "meta", **clipped)
            assert [trainer.step(batch, batch) for _ in range(2)] == [1.0] * 2
            on_device = name in ON_DEVICE and isinstance(schedule, Streaming)
            late = isinstance(schedule, Flushing) or on_device
            num_stages = 4 if isinstance(schedule, Interlocking) else 1
            # Else a loss is read before its backward, as an update may follow; heads report, too.
            assert reads.count(LOSSES) == 2 * (1 if late else 4 * num_stages)
            reads.clear()
            weighted = build(schedule, OPTIMIZERS[name], "meta", loss_weight_fn=torch.sum)
            assert [weighted.step(batch, batch) for _ in range(2)] == [1.0] * 2
            both = 1 + (1 if late else 4 * num_stages)  # the weights at once
            assert reads.count(LOSSES) == 2 * both
            reads.clear()


@pytest.mark.parametrize("name", [slow("fused AdamW"), "pyparallel.optim.AdamW"])
@pytest.mark.parametrize(
    "every",
    [[schedules.OneForwardOneBackward(), schedules.PipeOptim()], slow(schedules.EVERY_SCHEDULE)],
    ids=["two schedules", "every schedule"],
)
def test_no_schedule_waits_for_each_loss_with_fused_adam(name, every, reads, subtests):
    batch = torch.empty(8, 4, device="meta")
    for schedule in every:
        with subtests.test(schedule=schedule):
            reads.clear()
            trainer = build(schedule, OPTIMIZERS[name], "meta", max_norm=1.0)
            assert [trainer.step(batch, batch) for _ in range(3)] == [1.0] * 3
            # That torch's step counts are equal is read once, for the first predictions.
            assert reads.count(LOSSES) == 3
            if name == "pyparallel.optim.AdamW":
                assert len(reads) == 3
                next(trainer.stages[0].module.parameters()).requires_grad_(False)  # no gradient
            reads.clear()
            assert [trainer.step(batch, batch) for _ in range(3)] == [1.0] * 3
            assert reads == [LOSSES] * 3
            trainer.flush()


@pytest.mark.parametrize("schedule", [schedules.OneForwardOneBackward(), schedules.PipeOptim()])
def test_each_loss_is_copied_before_its_backward_and_read_after_all(schedule, monkeypatch):
    """So the host waits for the last loss, and not for the backwards and updates behind it."""
    order = []

    class Recorded(loss.HostCopy):
        def __init__(self, tensor):
            order.append("copy")
            super().__init__(tensor)

    def recording(name, function):
        def run(*arguments):
            order.append(name)
            return function(*arguments)

        return run

    monkeypatch.setattr(loss, "HostCopy", Recorded)
    monkeypatch.setattr(loss, "host_values", recording("read", loss.host_values))
    monkeypatch.setattr(torch.autograd, "backward", recording("backward", torch.autograd.backward))
    with as_on_gpus():
        layers = [nn.Linear(4, 4)]
        trainer = PipelineTrainer(
            layers, nn.functional.mse_loss, optim.AdamW, schedule, num_microbatches=3, split=()
        )
    trainer.step(torch.ones(6, 4), torch.ones(6, 4))
    assert order == [*["copy", "backward"] * 3, "read"]


def test_losses_that_are_checked_late_are_reported_alike():
    losses = []
    for defers_check in (False, True):
        torch.manual_seed(0)
        with as_on_gpus(defers_check):
            trainer = build(schedules.GPipe(), OPTIMIZERS["SGD"], "cpu")
        batch = torch.randn(7, 4), torch.randn(7, 4)
        losses.append([trainer.step(*batch), trainer.evaluate(*batch), trainer.step(*batch)])
    assert losses[0] == losses[1]
