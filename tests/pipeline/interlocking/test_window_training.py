"""Stages learn from the losses that the paper gives each window (arXiv 2010.04116)."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from pyparallel.pipeline import Farthest, Interlocking, Mean, PipelineTrainer, Sum
from pyparallel.pipeline.messages.endpoints import StreamKind
from pyparallel.pipeline.messages.stage_p2p import StageP2P
from tests.pipeline.interlocking.jobs import (
    WINDOWS,
    Case,
    chain,
    interlock,
    same,
    train_case,
    values_of,
)
from tests.pipeline.models import OPTIMIZERS, build_calls


def test_the_whole_window_is_plain_training(subtests):
    for optimizer in ["momentum", "AdamW"]:
        for num_microbatches in [1, 3]:
            with subtests.test(optimizer=optimizer, num_microbatches=num_microbatches):
                case = Case(4, num_microbatches=num_microbatches, optimizer=optimizer)
                model = nn.Sequential(*case.layers())
                plain = OPTIMIZERS[optimizer](list(model.parameters()))
                for inputs, target in itertools.chain(*case.calls):
                    parts = (each.tensor_split(num_microbatches) for each in (inputs, target))
                    for x, y in zip(*parts, strict=True):
                        (mse_loss(model(x), y) * (len(x) / len(inputs))).backward()
                    plain.step()
                    plain.zero_grad()
                found = train_case(case, 4).state
                modules = [value for stage in range(4) for value in found[f"{stage}.module"]]
                wanted = list(model.state_dict().values())
                torch.testing.assert_close(modules, wanted, rtol=1e-12, atol=1e-12)


def gold(window, losses, num_stages):
    """Train multipliers 2, 3, 4, 5 of ones on a cross entropy, the last on a tenth of the sum."""

    class Multiplier(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), float(factor)))

        def forward(self, value):
            return value * self.weight

    layers = [Multiplier(2 + stage) for stage in range(num_stages)]
    trainer = PipelineTrainer(
        layers,
        lambda output, target: 0.1 * output.sum(),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        Interlocking(
            window,
            [nn.Identity() for _ in layers[1:]],
            losses,
            head_loss_fn=cross_entropy,
        ),
        num_microbatches=1,
        split=range(1, num_stages),
    )
    trainer.step(torch.ones(1, 2), torch.tensor([1]))
    return [layer.weight.tolist() for layer in layers]


AUTHORS_EXAMPLES = [
    (3, Farthest(), [[0.8, 0.8], [2.2, 2.2], [3.4, 3.4]]),
    (1, Farthest(), [[1.5, 2.5], [2.0, 4.0], [3.4, 3.4]]),
    (2, Farthest(), [[0.5, 3.5], [2.2, 2.2], [3.4, 3.4]]),
    (2, Sum(), [[0.0, 4.0], [1.2, 3.2], [3.4, 3.4]]),
    (2, Mean(), [[1.0, 3.0], [2.1, 3.1], [3.4, 3.4]]),
    (3, Farthest(), [[-4.0, 8.0], [-1.0, -1.0], [1.0, 1.0], [2.6, 2.6]]),
]


def test_the_authors_examples(subtests):
    for window, losses, weights in AUTHORS_EXAMPLES:
        with subtests.test(window=window, losses=losses, weights=weights):
            found = gold(window, losses, len(weights))
            torch.testing.assert_close(torch.tensor(found), torch.tensor(weights))


def changes_of(window, perturbed=None, losses=None):
    """Return the changes of modules and heads in one step, with one replaced before it."""
    stages, heads = chain()
    others, other_heads = chain(seed=42)
    if perturbed is not None:
        kind, stage = perturbed
        (stages if kind == "module" else heads)[stage] = (
            others if kind == "module" else other_heads
        )[stage]
    parts = [*(("module", each) for each in stages), *(("head", each) for each in heads)]
    before = [values_of(module) for _, module in parts]
    trainer = interlock(stages, heads, window, losses, num_microbatches=2)
    trainer.step(*build_calls(1, 6)[0])
    moved = [
        [after - earlier for after, earlier in zip(values_of(module), old, strict=True)]
        for (_, module), old in zip(parts, before, strict=True)
    ]
    return moved[:4], moved[4:]


LEARNS_FROM = {  # the losses that a stage of four learns from
    Farthest(): lambda stage, window: {min(stage + window - 1, 3)},
    Sum(): lambda stage, window: set(range(stage, min(stage + window, 4))),
}


def test_a_stage_depends_on_its_window_alone(subtests):
    for losses, origins in LEARNS_FROM.items():
        for window in WINDOWS:
            with subtests.test(losses=losses, window=window):
                modules, heads = changes_of(window, losses=losses)
                for later in range(1, 4):
                    moved, moved_heads = changes_of(window, ("module", later), losses)
                    for stage in range(later):
                        within = later <= min(stage + window - 1, 3)
                        assert same(moved[stage], modules[stage]) is not within, (stage, later)
                        assert same(moved_heads[stage], heads[stage]), (stage, later)
                for owner in range(3):
                    moved, moved_heads = changes_of(window, ("head", owner), losses)
                    for stage in range(4):
                        within = owner in origins(stage, window)
                        assert same(moved[stage], modules[stage]) is not within, (stage, owner)
                    for stage in set(range(3)) - {owner}:
                        assert same(moved_heads[stage], heads[stage]), (stage, owner)
                    assert not same(moved_heads[owner], heads[owner])


def count_gradients(window, losses, monkeypatch):
    """Return how many each stage receives from the next, in a step of two microbatches."""
    counts = [0, 0, 0]
    send = StageP2P.send

    def counting(p2p, endpoint, number, value, *batch):
        if endpoint.kind is StreamKind.GRADIENTS and endpoint.stage >= 0 and value != ():
            counts[endpoint.stage] += 1
        send(p2p, endpoint, number, value, *batch)

    monkeypatch.setattr(StageP2P, "send", counting)
    interlock(*chain(), window, losses, num_microbatches=2).step(*build_calls(1, 6)[0])
    return counts


@pytest.mark.parametrize("window", WINDOWS)
def test_as_many_gradients_are_sent_as_in_the_paper(window, monkeypatch):
    of_paper = [min(window - 1, 4 - (stage + 2) + 1) for stage in range(3)]
    found = count_gradients(window, Mean(), monkeypatch)
    assert found == [2 * each for each in of_paper]
    unused = [len([o for o in range(stage + 1, stage + window) if o < window - 1])
              for stage in range(3)]  # fmt: skip
    of_ours = [2 * (all_ - less) for all_, less in zip(of_paper, unused, strict=True)]
    assert count_gradients(window, Farthest(), monkeypatch) == of_ours
