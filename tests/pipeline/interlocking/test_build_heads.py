"""Heads are built and checked on the first microbatch, without side effects."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import LinearHead
from pyparallel.pipeline.interlocking.build_heads import build_heads
from pyparallel.pipeline.interlocking.heads import GivenHead
from pyparallel.pipeline.messages.stage_p2p import StageP2P
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter
from pyparallel.pipeline.schedules.shape import PipelineShape

SHAPE = PipelineShape(3, 2, 1)


def build_modules():
    torch.manual_seed(0)
    return {
        0: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)),
        1: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5)),
        2: nn.Linear(4, 2),
    }


def build(modules, heads, loss_fn=mse_loss, inputs=None, target=None):
    inputs = torch.ones(8, 6) if inputs is None else inputs
    splitter = MicrobatchSplitter(inputs, torch.ones(8, 2) if target is None else target, 0, 2)
    return build_heads(modules, heads, loss_fn, SHAPE, splitter, StageP2P(SHAPE, None))


def test_heads_fit_the_outputs_of_their_stages():
    built = build(build_modules(), {0: LinearHead(2), 1: LinearHead(2)})
    assert [head.in_features for head in built.values()] == [5, 4]


def test_building_has_no_side_effects():
    modules = build_modules()
    given = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
    parts = nn.ModuleList([*modules.values(), given])
    before, generator = copy.deepcopy(parts.state_dict()), torch.get_rng_state()
    built = build(modules, {0: GivenHead(given), 1: LinearHead(2)})
    assert built[0] is given
    assert torch.equal(torch.get_rng_state(), generator)
    after = parts.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(p.grad is None for p in parts.parameters())
    assert all(module.training for module in parts.modules())


def weights_of_heads(seed):
    torch.manual_seed(seed)
    modules = build_modules()
    torch.manual_seed(seed)
    torch.rand(seed)  # the generator's state does not matter
    built = build(modules, {0: LinearHead(2), 1: LinearHead(2)})
    return [head.weight for head in built.values()]


def test_a_head_depends_on_the_seed_and_its_stage_alone():
    first, again, other = map(weights_of_heads, (3, 3, 4))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not torch.equal(first[0][:, :4], first[1])


def failing_loss(output, target):
    raise LookupError("no loss")


UNFIT_HEADS = [
    (
        [LinearHead(2), nn.Linear(9, 2)],
        {},
        "heads must return outputs that loss_fn takes: that of stage 1, GivenHead(module="
        "Linear(in_features=9, out_features=2, bias=True)), returns None for a tensor of "
        "shape [4, 4] and torch.float32, the target is a tensor of shape [4, 2] and torch.float32: "
        "RuntimeError: ",
    ),
    (
        [LinearHead(2), LinearHead(2)],
        {"loss_fn": failing_loss},
        "heads must return outputs that loss_fn takes: that of stage 0, LinearHead(num_outputs="
        "2, norm=None), returns a tensor of shape [4, 2] and torch.float32 for a tensor of shape "
        "[4, 5] and torch.float32, the target is a tensor of shape [4, 2] and torch.float32: "
        "LookupError: no loss",
    ),
    (
        [LinearHead(2), LinearHead(2)],
        {"loss_fn": lambda output, target: (output - target).square().sum(1)},
        "heads must return outputs for which loss_fn returns a 0-d tensor, got a tensor of shape "
        "[4] and torch.float32 for a tensor of shape [4, 2] and torch.float32 from that of stage "
        "0, LinearHead(num_outputs=2, norm=None)",
    ),
    (
        [LinearHead(2), LinearHead(2)],
        {"inputs": torch.ones(8, 7)},
        "stage 0 failed on the first microbatch: RuntimeError: ",  # and torch's words
    ),
    (
        [LinearHead(2), LinearHead(2)],
        {"inputs": torch.ones(1, 6)},
        "inputs must have one number of samples, at least one for each of the 2 microbatches",
    ),
]


def test_heads_that_do_not_fit_are_reported(subtests):
    for heads, options, message in UNFIT_HEADS:
        with subtests.test(message=message):
            given = [GivenHead(each) if isinstance(each, nn.Module) else each for each in heads]
            with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
                build(build_modules(), dict(enumerate(given)), **options)
            assert caught.value.__cause__ is not None


def test_the_first_stage_that_fails_is_reported():
    modules = build_modules()
    modules[1] = nn.Linear(9, 9)
    sentence = "^heads must return outputs that loss_fn takes: that of stage"
    with pytest.raises(ValueError, match=sentence):
        build(modules, {0: GivenHead(nn.Linear(8, 8)), 1: LinearHead(2)})
