"""Batches that are lists, dicts and tuples, and short ones, against the unsplit model."""

import pytest
import torch
from torch import nn

from pyparallel.pipeline import (
    OneForwardOneBackward,
    PipelineTrainer,
)
from tests.pipeline import reference
from tests.pipeline.every_schedule import one_of_each_kind_first
from tests.pipeline.jobs import IN_ANY_DTYPE

WIDTH, NUM_MICROBATCHES = 4, 3
SIZES = [[8, 3, 7, 5], [4, 11]]  # samples of each step, until each flush; at least one a microbatch


class First(nn.Module):
    """A layer of several arguments, tensors and others."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None, flag=False, *, scale=1.0, nested=None):
        assert flag == (mask is not None)
        value = self.linear(x if mask is None else torch.where(mask, x, 0))
        return scale * (value if nested is None else value + nested["shift"][0])


class FirstOfOneTensor(nn.Module):
    """The same, called with all of its arguments in one tensor, as the reference calls layers."""

    def __init__(self):
        super().__init__()
        self.first = First()

    def forward(self, value):
        x, mask, shift, scale = value.split([WIDTH, WIDTH, WIDTH, 1], dim=1)
        return scale * (self.first.linear(torch.where(mask > 0, x, 0)) + shift)


def build_layers(first=First):
    torch.manual_seed(5)
    layers = [first(), nn.Tanh(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Tanh()]
    return [layer.double() for layer in [*layers, nn.Linear(WIDTH, 2)]]


SPLIT = [2, 4, 5]


def squared_error(output, target):
    """Return the weighted mean over samples; the target is a tensor in the reference."""
    if isinstance(target, torch.Tensor):
        target = target.split([2, 1], dim=1)
    wanted, weight = target.values() if isinstance(target, dict) else target
    return (weight * (output - wanted).square()).mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build_batches():
    """Return for each step the inputs and target, and both as one tensor each."""
    generator = torch.Generator().manual_seed(6)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def one_tensor(x, mask, shift, scale):
        return torch.cat([x, mask.double(), shift, torch.full((len(x), 1), scale)], dim=1)

    given, packed = [], []
    for number, size in enumerate(size for sizes in SIZES for size in sizes):
        x, wanted, weight, shift = draw(size, WIDTH), draw(size, 2), draw(size, 1), draw(size, 4)
        mask, none = draw(size, WIDTH) > 0, torch.zeros(size, WIDTH)
        inputs, packed_inputs = [
            ([x], one_tensor(x, torch.ones_like(mask), none, 1.0)),
            ([x, mask, True], one_tensor(x, mask, none, 1.0)),
            (
                {"x": x, "mask": mask, "flag": True, "scale": 2.0, "nested": {"shift": [shift]}},
                one_tensor(x, mask, shift, 2.0),
            ),
            ({"x": x, "mask": None, "flag": False}, one_tensor(x, mask | ~mask, none, 1.0)),
        ][number % 4]
        target = [(wanted, weight), [wanted, weight], {"y": wanted, "weight": weight}][number % 3]
        given.append((inputs, target))
        packed.append((packed_inputs, torch.cat([wanted, weight], dim=1)))
    return given, packed


def in_streams(calls):
    rest = iter(calls)
    return [[next(rest) for _ in sizes] for sizes in SIZES]


def train(schedule, calls=None, **options):
    """Return the losses of steps and of evaluations after each flush, and the weights."""
    options = {"split": SPLIT, "layers": build_layers(), **options}
    trainer = PipelineTrainer(
        options.pop("layers"), squared_error, sgd, schedule,
        num_microbatches=NUM_MICROBATCHES, **options,
    )  # fmt: skip
    calls = build_batches()[0] if calls is None else calls
    trainer.prepare(*calls[0])
    losses, evaluated = [], []
    for stream in in_streams(calls):
        losses += [trainer.step(*call) for call in stream]
        evaluated.append([trainer.evaluate(*call) for call in stream])
    weights = {name: p.detach().clone() for stage in trainer.stages
               for name, p in stage.module.named_parameters()}  # fmt: skip
    return losses, evaluated, weights


def train_in_each_schedule(rank, schedules):
    done = [train(schedule) for schedule in schedules]
    return [*done, train(OneForwardOneBackward(), split=None, num_stages=4)]


def expected(schedule):
    """Return what ``train`` must return on the ranks together, by the reference."""
    calls = build_batches()[1]
    done = reference.train_in_one_process(
        lambda: build_layers(FirstOfOneTensor), SPLIT, squared_error, sgd, schedule,
        in_streams(calls), NUM_MICROBATCHES,
    )  # fmt: skip
    evaluated = []
    for index, stream in enumerate(in_streams(calls)):
        model = nn.Sequential(*build_layers(FirstOfOneTensor))
        count = sum(map(len, SIZES[: index + 1])) * (
            NUM_MICROBATCHES // reference.microbatches_per_update(schedule, NUM_MICROBATCHES)
        )
        for stage in done.stages:
            version = [*stage.past, *stage.history][count]
            model.load_state_dict(version.weights(), strict=False)
        with torch.no_grad():
            evaluated.append([squared_error(model(x), y).item() for x, y in stream])
    return done.losses, evaluated, {k.replace(".first.", "."): v for k, v in done.state.items()}


@one_of_each_kind_first(IN_ANY_DTYPE)
def test_every_schedule_trains_on_lists_dicts_and_short_batches(schedules, ranks, subtests):
    by_rank = ranks.run(2, train_in_each_schedule, schedules)
    schedules = [*schedules, OneForwardOneBackward()]  # the last is split automatically
    for schedule, (_, _, first), (losses, evaluated, second) in zip(
        schedules, *by_rank, strict=True
    ):
        with subtests.test(repr(schedule)):
            wanted_losses, wanted_evaluated, weights = expected(schedule)
            assert losses == pytest.approx(wanted_losses, rel=1e-12)
            for found, wanted in zip(evaluated, wanted_evaluated, strict=True):
                assert found == pytest.approx(wanted, rel=1e-12)
            torch.testing.assert_close({**first, **second}, weights, rtol=1e-12, atol=1e-12)
