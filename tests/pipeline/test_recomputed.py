"""Layers that torch recomputes in the backward, against the model unsplit and the reference."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from pyparallel.pipeline import Schedule, ZeroBubble
from tests.pipeline import reference
from tests.pipeline.jobs import DEEP, IN_ANY_DTYPE, Trained, train, train_on
from tests.pipeline.models import OPTIMIZERS, WIDTH, build_calls
from tests.workers import RankPool

SPLIT = [1, 2, 3]
STREAMS = [build_calls(3, 12), build_calls(1, 12)]
KINDS = "reentrant", "not reentrant", "wrapped"


class Recomputed(nn.Module):
    def __init__(self, layer: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = layer
        self.use_reentrant = use_reentrant

    def forward(self, value):
        return checkpoint(self.layer, value, use_reentrant=self.use_reentrant)


def build_layers(kind: str, dropout: float = 0.0) -> list[nn.Module]:
    """Return a layer for each stage, of which all but the first are recomputed."""
    torch.manual_seed(11)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    for outputs in (WIDTH, WIDTH, 2):
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
        block = nn.Sequential(nn.LayerNorm(WIDTH), first, nn.Tanh(), nn.Dropout(dropout), last)
        match kind:
            case "wrapped":
                block = checkpoint_wrapper(block)
            case "reentrant" | "not reentrant":
                block = Recomputed(block, kind == "reentrant")
        layers.append(block)
    return [layer.double() for layer in layers]


def is_possible(schedule: Schedule, kind: str) -> bool:
    """Return whether torch can split a backward that recomputes."""
    return kind != "reentrant" or not isinstance(schedule, ZeroBubble)


Case = tuple[Schedule, str]
CASES = [(each, kind) for each in IN_ANY_DTYPE for kind in KINDS if is_possible(each, kind)]
PLAIN = [(each, "plain") for each in IN_ANY_DTYPE]


def train_one(case: Case, num_stages: int, dropout: float) -> Trained:
    schedule, kind = case
    return train(schedule, build_layers(kind, dropout), SPLIT, OPTIMIZERS["momentum"], STREAMS)


def train_all(ranks: RankPool, dropout: float) -> dict[Case, Trained]:
    """Return all trainings, with the names of layers that are not recomputed."""
    cases = [*CASES, *PLAIN]
    trained = train_on(ranks, DEEP, partial(train_one, dropout=dropout), cases)
    for each in trained:
        each.state = {k.replace(".layer.", "."): v for k, v in each.state.items()}
    return dict(zip(cases, trained, strict=True))


def recompute(stage: reference.Stage, done: reference.Pass, read, gradients) -> None:
    """Run a backward after the forward again, with the weights that the backward reads."""
    leaves = {name: w.clone().requires_grad_() for name, w in stage.read(read).items()}
    outputs = functional_call(stage.module, leaves, (done.inputs,))
    backward(stage, reference.Pass(done.inputs, outputs, leaves), read, gradients)


backward = reference.Stage.backward


def expected(schedule: Schedule) -> tuple[reference.Trained, reference.Trained]:
    """Return the reference with layers that are recomputed, and without."""

    def run() -> reference.Trained:
        return reference.train_in_one_process(
            lambda: build_layers("plain"),
            SPLIT, mse_loss, OPTIMIZERS["momentum"], schedule, STREAMS, 4,
        )  # fmt: skip

    with patch.object(reference.Stage, "backward", recompute):
        recomputed = run()
    return recomputed, run()


def is_live(schedule: Schedule) -> bool:
    """Return whether backwards read other weights than the forwards."""
    rules = [reference.reads(schedule, m, 1, 4, 4) for m in range(12)]
    return any(forward != backward for forward, backward in rules)


def assert_close(found: Trained, wanted: Trained | reference.Trained) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    torch.testing.assert_close(found.state, wanted.state, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_layer_is_recomputed_with_the_weights_of_its_backward(ranks, subtests):
    found = train_all(ranks, 0.0)
    for schedule in IN_ANY_DTYPE:
        recomputed, plain = expected(schedule)
        differ = abs(recomputed.losses[-1] - plain.losses[-1]) > 1e-6
        assert differ == is_live(schedule)
        assert_close(found[schedule, "plain"], plain)
        for case in CASES:
            if case[0] == schedule:
                with subtests.test(case=case):
                    assert_close(found[case], recomputed)


@pytest.mark.slow
def test_recomputed_dropout_is_the_forwards(ranks, subtests):
    found = train_all(ranks, 0.5)
    for case in CASES:
        if not is_live(case[0]):
            with subtests.test(case=case):
                assert_close(found[case], found[case[0], "plain"])


def split_a_reentrant_backward(rank: int) -> None:
    layers = build_layers("reentrant")
    train(ZeroBubble(), layers, [2], OPTIMIZERS["momentum"], STREAMS)


def test_a_split_backward_that_recomputes_reentrantly_is_one_error(ranks):
    errors = [each.error for each in ranks.observe(2, split_a_reentrant_backward)]
    for error in errors:
        assert error.startswith(
            "StageError: stage 1 on rank 1 failed in the backward for the input"
        )
        assert "use_reentrant=False" in error
