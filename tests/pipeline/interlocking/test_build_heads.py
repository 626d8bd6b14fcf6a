"""Heads are built and tried on the first microbatch, and nothing else is left of that."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import GPipe, Interlocking, LinearHead, PipelineTrainer
from pyparallel.pipeline.interlocking.build_heads import build_heads
from pyparallel.pipeline.interlocking.heads import GivenHead
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter
from pyparallel.pipeline.runtime.p2p import StageP2P
from pyparallel.pipeline.schedules.shape import PipelineShape

LAYOUT = PipelineShape(3, 2, 1)


def build_modules():
    torch.manual_seed(0)
    return {
        0: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)),
        1: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5)),
        2: nn.Linear(4, 2),
    }


def fit(modules, heads, loss_fn=mse_loss, inputs=None, target=None):
    inputs = torch.ones(8, 6) if inputs is None else inputs
    feed = MicrobatchSplitter(inputs, torch.ones(8, 2) if target is None else target, 0, 2)
    return build_heads(modules, heads, loss_fn, LAYOUT, feed, StageP2P(LAYOUT, None))


def test_heads_fit_what_their_stages_hand_on():
    fitting = fit(build_modules(), {0: LinearHead(2), 1: LinearHead(2)})
    assert fitting.problem is None
    assert [head.in_features for head in fitting.heads.values()] == [5, 4]


def test_nothing_else_is_left():
    modules = build_modules()
    given = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
    parts = nn.ModuleList([*modules.values(), given])
    before, generator = copy.deepcopy(parts.state_dict()), torch.get_rng_state()
    fitting = fit(modules, {0: GivenHead(given), 1: LinearHead(2)})
    assert fitting.heads[0] is given
    assert torch.equal(torch.get_rng_state(), generator)
    after = parts.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(p.grad is None for p in parts.parameters())
    assert all(module.training for module in parts.modules())


def weights_of_heads(seed):
    torch.manual_seed(seed)
    modules = build_modules()
    torch.manual_seed(seed)
    torch.rand(seed)  # where the generator has come to does not matter
    fitting = fit(modules, {0: LinearHead(2), 1: LinearHead(2)})
    return [head.weight for head in fitting.heads.values()]


def test_a_head_depends_on_the_seed_and_its_stage_alone():
    first, again, other = map(weights_of_heads, (3, 3, 4))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not torch.equal(first[0][:, :4], first[1])


def broken(output, target):
    raise LookupError("no loss")


@pytest.mark.parametrize(
    ("heads", "options", "sentence"),
    [
        (
            [LinearHead(2), nn.Linear(9, 2)],
            {},
            "heads must give outputs that loss_fn takes: that of stage 1, GivenHead(module=Linear("
            "in_features=9, out_features=2, bias=True)), makes None of [4, 4], the target is "
            "[4, 2]: RuntimeError: ",
        ),
        (
            [LinearHead(2), LinearHead(2)],
            {"loss_fn": broken},
            "heads must give outputs that loss_fn takes: that of stage 0, LinearHead(num_outputs="
            "2, norm=None), makes [4, 2] of [4, 5], the target is [4, 2]: LookupError: no loss",
        ),
        (
            [LinearHead(2), LinearHead(2)],
            {"loss_fn": lambda output, target: (output - target).square().sum(1)},
            "heads must give outputs of which loss_fn makes a 0-d tensor, that of stage 0, "
            "LinearHead(num_outputs=2, norm=None), makes [4, 2], and the loss is [4]",
        ),
        (
            [LinearHead(2), LinearHead(2)],
            {"inputs": torch.ones(8, 7)},
            "stage 0 failed on the first microbatch: RuntimeError: mat1 and mat2 shapes",
        ),
        (
            [LinearHead(2), LinearHead(2)],
            {"inputs": torch.ones(1, 6)},
            "inputs must have one number of samples, at least one for each of the 2 microbatches",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_sentence(heads, options, sentence):
    given = [GivenHead(each) if isinstance(each, nn.Module) else each for each in heads]
    fitting = fit(build_modules(), dict(enumerate(given)), **options)
    assert fitting.problem.startswith(sentence)
    assert fitting.cause is not None


def test_the_first_stage_that_fails_is_told_of():
    modules = build_modules()
    modules[1] = nn.Linear(9, 9)
    fitting = fit(modules, {0: GivenHead(nn.Linear(8, 8)), 1: LinearHead(2)})
    assert fitting.problem.startswith("heads must give outputs that loss_fn takes: that of stage 0")


def test_the_first_step_is_as_if_heads_had_been_there():
    """What a plain trainer comes to, as the whole window makes heads of no account."""
    losses = []
    for schedule in (GPipe(), Interlocking(3, LinearHead(2))):
        modules = build_modules()
        trainer = PipelineTrainer(
            list(modules.values()), mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), schedule,
            num_microbatches=1, split=[1, 2],
        )  # fmt: skip
        torch.manual_seed(5)
        losses.append([trainer.step(torch.ones(8, 6), torch.ones(8, 2)) for _ in range(2)])
    assert losses[0] == losses[1]
