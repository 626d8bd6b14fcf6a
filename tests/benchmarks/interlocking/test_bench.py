"""The parts of the interlocking benchmark: its systems, its straggler, both ways of gradients."""

import torch
from torch import nn

from benchmarks.interlocking import cotangents
from benchmarks.interlocking.bench import Dry
from benchmarks.interlocking.sleeping import Slowdown, Straggler, end_to_end
from pyparallel.pipeline.interlocking.stage import InterlockingStage
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter
from pyparallel.pipeline.runtime.stage_weights import LiveWeights


def names(systems):
    return [system.name for system in systems]


def test_torchs_schedule_needs_as_many_microbatches_as_stages():
    assert "torch 1F1B" not in names(end_to_end(4, 3))
    assert "torch 1F1B" in names(end_to_end(4, 4))


def test_the_straggler_is_slow_from_its_step_on_in_every_turn(monkeypatch):
    slept = []
    monkeypatch.setattr("benchmarks.interlocking.sleeping.time.sleep", slept.append)
    layer = Straggler(Slowdown(normal=2, slow=1, seconds=0.5))
    for _ in range(6):
        layer(torch.ones(1, requires_grad=True)).sum().backward()
    assert slept == [0, 0, 0.5, 0, 0, 0.5]


def test_both_ways_give_the_same_gradients():
    for compute in Dry.computes:
        check_both_ways(compute)


def check_both_ways(compute):
    torch.manual_seed(0)
    module = compute.build()
    assert isinstance(module, nn.Module)
    stage = InterlockingStage(0, module, [], LiveWeights(None), None, None)
    output = stage.forward(
        0, compute.make_input().requires_grad_(), MicrobatchSplitter(None, None, 0, 1)
    )
    gradients = [(torch.randn_like(output),) for _ in range(3)]
    together, apart = (cotangents.input_vjp(stage, gradients, at_once) for at_once in (3, 1))
    assert len(together) == len(apart) == 3
    for (one,), (other,) in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other)
