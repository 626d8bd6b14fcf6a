"""The parts of the interlocking benchmark: its systems and its straggler."""

import torch

from benchmarks.interlocking.sleeping import Slowdown, Straggler, end_to_end


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
