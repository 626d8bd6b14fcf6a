"""Pipelines on a GPU train as on the CPU; after the first steps nothing makes the host wait."""

import copy

import pytest
import torch
from torch import nn

from pyparallel import optim
from pyparallel.pipeline import (
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeOptim,
    ZeroBubble,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

NUM_STEPS, WARM_UP = 20, 3
SPLIT = (1, 2, 3)
CASES = {
    "1F1B": (OneForwardOneBackward(), {"max_norm": 1.0}),
    "zero bubble": (ZeroBubble(), {}),
    "PipeDream": (PipeDream(), {}),
    "PipeOptim": (PipeOptim(), {}),
    "Interlocking": (Interlocking(2, tuple(LinearHead(8) for _ in SPLIT)), {}),
}
OPTIMIZERS = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "torch, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "pyparallel": lambda parameters: optim.AdamW(parameters, lr=0.01),
}


def build_layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]


def losses_of(device, schedule, optimizer_fn, **options):
    """Return the losses of the steps, all on one device."""
    layers = [each.to(device) for each in build_layers()]
    torch.manual_seed(1)  # of heads
    trainer = PipelineTrainer(
        layers, nn.functional.mse_loss, optimizer_fn, schedule,
        num_microbatches=4, split=SPLIT, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    inputs, target = (torch.randn(16, 8, generator=generator).to(device) for _ in range(2))
    losses = []
    try:
        for step in range(NUM_STEPS):
            if step == WARM_UP and device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            losses.append(trainer.step(inputs, target))
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    trainer.flush()
    return losses


def test_training_is_that_on_the_cpu_and_does_not_make_the_host_wait(subtests):
    for name, (schedule, options) in CASES.items():
        for kind, optimizer_fn in OPTIMIZERS.items():
            with subtests.test(schedule=name, optimizer=kind):
                own, wanted = (
                    losses_of(device, copy.deepcopy(schedule), optimizer_fn, **options)
                    for device in ("cuda", "cpu")
                )
                assert own == pytest.approx(wanted, rel=1e-3)
                assert own[-1] < own[0]


def train_over_gloo(rank):
    """Train on two processes that share a GPU, whose messages travel through the host."""
    losses = {}
    for name, (schedule, options) in CASES.items():
        if name != "Interlocking":
            for device in ("cuda", "cpu"):
                losses[name, device] = losses_of_ranks(device, schedule, **options)
    return losses


def losses_of_ranks(device, schedule, **options):
    """Return the losses of the steps of two ranks, over gloo if no process group is given."""
    layers = [each.to(device) for each in build_layers()]
    trainer = PipelineTrainer(
        layers, nn.functional.mse_loss, OPTIMIZERS["torch"], schedule,
        num_microbatches=4, split=(2,), **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    inputs, target = (torch.randn(16, 8, generator=generator).to(device) for _ in range(2))
    losses = [trainer.step(inputs, target) for _ in range(NUM_STEPS)]
    trainer.flush()
    return losses


def test_two_processes_share_a_gpu_over_gloo(ranks):
    first, last = ranks.run(2, train_over_gloo)
    for name, device in first:
        assert set(first[name, device][1:]) <= set(last[name, device])
        if device == "cuda":
            assert last[name, "cuda"] == pytest.approx(last[name, "cpu"], rel=1e-3)
