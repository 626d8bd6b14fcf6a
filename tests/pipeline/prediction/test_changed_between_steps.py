"""What a forward predicts after something else has changed the weights, or their optimizer."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel import optim
from pyparallel.pipeline import (
    Displacement,
    LastUpdate,
    PipelineTrainer,
    PipeOptim,
    UpdateErrorFeedback,
)
from tests.cases import slow

WIDTH = 3


class Recorder(nn.Linear):
    """A linear layer that records the weights that its forwards read."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False)
        self.read = []

    def forward(self, value):
        self.read.append(self.weight.detach().clone())
        return super().forward(value)


class Halved:
    """The learning rate is halved after each update, by something that torch does not know."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


class Run:
    """Two stages in one process, of which the first predicts one update ahead."""

    def __init__(self, kind, options, prediction, correction=None, scheduler=None, hook=None):
        torch.manual_seed(0)
        self.layer, self.prediction, self.options = Recorder(), prediction, options
        self.before = self.gradient = None  # of the last update
        optimizers = []

        def build(parameters):
            optimizers.append(kind(parameters, **options))
            if hook is not None:
                optimizers[-1].register_step_post_hook(hook)
            return optimizers[-1]

        self.trainer = PipelineTrainer(
            [self.layer, Recorder()], mse_loss, build,
            PipeOptim("consistent", prediction), num_microbatches=1, split=[1],
            correction=correction, scheduler_fn=scheduler,
        )  # fmt: skip
        self.optimizer = optimizers[0]
        self.optimizer.register_step_pre_hook(self.record)
        self.generator = torch.Generator().manual_seed(1)

    def record(self, optimizer, args, kwargs):
        weight = self.layer.weight
        self.before = weight.detach().clone()
        self.gradient = None if weight.grad is None else weight.grad.clone()

    def step(self):
        x = torch.randn(4, WIDTH, generator=self.generator)
        self.trainer.step(x, x.sin())
        self.after = self.layer.weight.detach().clone()

    def expected(self):
        """Return what the next forward must read, of what the weights and the optimizer are now."""
        weight = self.layer.weight.detach().clone()
        if not self.layer.weight.requires_grad:
            return weight
        if self.prediction == LastUpdate():
            return weight + self.after - self.before
        rate = self.optimizer.param_groups[0]["lr"]
        if self.options.get("momentum"):
            return weight - rate * self.optimizer.state[self.layer.weight]["momentum_buffer"]
        return weight if self.gradient is None else weight - rate * self.gradient


def write(run):
    with torch.no_grad():
        run.layer.weight.mul_(0.5)


def swap_and_back(run):
    kept = copy.deepcopy(run.layer.state_dict())
    run.layer.load_state_dict({"weight": torch.ones(WIDTH, WIDTH)})
    run.layer(torch.ones(1, WIDTH))
    run.layer.read.pop()
    run.layer.load_state_dict(kept)


def load_optimizer(run):
    state = copy.deepcopy(run.optimizer.state_dict())
    for entries in state["state"].values():
        entries.update((name, 2 * each) for name, each in entries.items() if "momentum" in name)
    run.optimizer.load_state_dict(state)


def freeze_a_while(run):
    run.layer.requires_grad_(False)
    run.step()
    run.step()
    run.layer.requires_grad_(True)


ACTS = {
    "nothing": lambda run: None,
    "the rate": lambda run: run.optimizer.param_groups[0].update(lr=0.03),
    "a write": write,
    "loaded weights": lambda run: run.layer.load_state_dict({"weight": torch.eye(WIDTH)}),
    "a swap": swap_and_back,
    "a loaded optimizer": load_optimizer,
    "frozen": lambda run: run.layer.requires_grad_(False),
    "frozen a while": freeze_a_while,
}


def clamp(optimizer, *_):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.clamp_(-0.3, 0.3)


MOMENTUM, PLAIN = {"lr": 0.2, "momentum": 0.9}, {"lr": 0.2, "weight_decay": 0.0}
RUNS = [
    *(partial(Run, kind, options, Displacement(), **more)
      for kind in (torch.optim.SGD, optim.SGD) for options in (MOMENTUM, PLAIN)
      for more in ({}, {"scheduler": Halved}, {"hook": clamp})),
    *(partial(Run, kind, MOMENTUM, LastUpdate(), **more)
      for kind in (torch.optim.SGD, optim.SGD)
      for more in ({}, {"hook": clamp}, {"correction": UpdateErrorFeedback()})),
]  # fmt: skip


@pytest.mark.parametrize("runs", [RUNS[6:9:2], slow(RUNS)], ids=["in the pass", "all"])
def test_a_forward_predicts_from_what_is_there_now(subtests, runs):
    for make in runs:
        for name, act in ACTS.items():
            with subtests.test(act=name, run=str((make.args[:3], make.keywords))):
                run = make()
                for _ in range(4):
                    run.step()
                act(run)
                for _ in range(2):
                    expected = run.expected()
                    run.step()
                    torch.testing.assert_close(run.layer.read[-1], expected, rtol=0, atol=1e-6)
