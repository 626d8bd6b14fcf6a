"""Models that were split for torch's pipelines."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipe_split, pipeline

from pyparallel.pipeline import GPipe, OneForwardOneBackward, PipeDream, PipelineTrainer
from pyparallel.pipeline.partition.torch_pipe import layers_and_split
from tests.cases import slow

sgd = partial(torch.optim.SGD, lr=0.1)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x, shift=0):
        return self.second((self.first(x) + shift).tanh())


BATCHES = {  # what a step is given, of a tensor and another one that is added to it inside
    "stage": lambda x, shift: x,
    "pipe": lambda x, shift: x,
    "pipe of a list": lambda x, shift: [x, shift],
    "pipe of a dict": lambda x, shift: {"shift": shift, "x": x},
}


def train(rank, kind):
    """Return the losses of the pipeline and of the unsplit model."""
    torch.manual_seed(0)
    model = Chain()
    whole = copy.deepcopy(model)
    x, shift, target = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 2)
    inputs, given = BATCHES[kind](x, shift), (x, shift) if " of a " in kind else (x,)
    if kind.startswith("pipe"):
        points = {"second": SplitPoint.BEGINNING}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its tracing
            example = tuple(each[:2] for each in given)
            stages = pipeline(model, mb_args=example, split_spec=points)
    else:
        part = nn.Sequential(model.first, nn.Tanh()) if rank == 0 else model.second
        stages = PipelineStage(part, rank, 2, torch.device("cpu"))
    trainer = PipelineTrainer(stages, nn.functional.mse_loss, sgd, GPipe(), num_microbatches=3)
    losses = [trainer.step(inputs, target) for _ in range(3)]
    optimizer = sgd(whole.parameters())
    expected = []
    for _ in range(3):
        loss = nn.functional.mse_loss(whole(*given), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    state = trainer.full_state_dict()
    if kind.startswith("pipe"):  # whose stages keep the names of the model
        assert state.keys() == (whole.state_dict().keys() if rank == 0 else set())
        for name, value in state.items():
            torch.testing.assert_close(value, whole.state_dict()[name])
    return losses, expected


def name_twice(rank):
    part = nn.Sequential(nn.Linear(4, 4))
    stages = PipelineStage(part, rank, 2, torch.device("cpu"))
    trainer = PipelineTrainer(stages, nn.functional.mse_loss, sgd, GPipe(), num_microbatches=3)
    errors = []
    for state in (trainer.full_state_dict, trainer.sharded_state_dict):
        with pytest.raises(ValueError, match=r"got 0.weight, 0.bias in several: split") as caught:
            state()
        errors.append(str(caught.value))
    return errors


def test_stages_that_are_not_of_one_model_have_no_state_of_the_whole(ranks):
    first, second = ranks.run(2, name_twice)
    assert first == second


def train_each(rank):
    return {kind: train(rank, kind) for kind in BATCHES}


def test_trains_as_the_unsplit_model(ranks):
    for kind, (losses, expected) in ranks.run(2, train_each)[1].items():
        assert losses == pytest.approx(expected), kind


class Shared(nn.Module):
    """A model whose stages both read one weight, and its bias under another name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.linear = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.bias = self.linear.bias

    def forward(self, x):
        x = torch.relu(self.linear(x @ self.weight))
        pipe_split()
        return self.last(x @ self.weight)


def train_shared(rank, schedules):
    """Return of each schedule the losses and the state of the whole, from batches that flush."""
    found = []
    for schedule in schedules:
        torch.manual_seed(0)
        model = Shared().double()
        x, target = torch.randn(2, 3, 6, 4).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its tracing
            pipe = pipeline(model, mb_args=(x[0],))
        trainer = PipelineTrainer(pipe, nn.functional.mse_loss, sgd, schedule, num_microbatches=1)
        losses = []
        for batch in zip(x, target, strict=True):
            losses.append(trainer.step(*batch))
            trainer.flush()
        found.append((losses, trainer.full_state_dict()))
    return found


@pytest.mark.parametrize("schedules", [[GPipe()], slow([OneForwardOneBackward(), PipeDream()])])
def test_a_parameter_that_stages_share_is_one_as_in_the_unsplit_model(ranks, subtests, schedules):
    first, last = ranks.run(2, train_shared, schedules)
    torch.manual_seed(0)
    model = Shared().double()
    x, target = torch.randn(2, 3, 6, 4).double()
    optimizer, losses = sgd(model.parameters()), []
    for inputs, wanted in zip(x, target, strict=True):
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for schedule, (_, state), (found, _) in zip(schedules, first, last, strict=True):
        with subtests.test(schedule=schedule):
            assert found == pytest.approx(losses, rel=1e-12)
            torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-12, atol=1e-12)


def test_plain_layers_are_returned_unchanged():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert layers_and_split(layers, None) == (list(layers), None)
    assert layers_and_split(list(layers), [1]) == (list(layers), [1])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its tracing
def test_a_second_split_is_refused():
    traced = pipeline(Chain(), (torch.ones(2, 4),), split_spec={})
    with pytest.raises(ValueError, match=r"split must be None for a model .* got \[1\]"):
        layers_and_split(traced, [1])
