"""Stages are built on all ranks or on none."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pyparallel.pipeline import Interlocking, LinearHead, PipelineTrainer, TiedHead

sgd = partial(torch.optim.SGD, lr=0.1)


TOKENS = torch.full((3, 5), 10)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, value):
        return value + self.table.weight[:5]


def build_layers():
    torch.manual_seed(0)
    return [
        nn.Embedding(11, 6),
        nn.Linear(6, 6),
        nn.Linear(6, 6),
        nn.Sequential(Positions(), nn.Linear(6, 11)),
    ]


def loss_fn(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def train(rank, change):
    """Train with a mistake in the arguments; return the error, or "trained"."""
    layers = build_layers()
    before = [p.clone() for layer in layers for p in layer.parameters()]
    settings = {"window": 2, "heads": LinearHead(11), "split": [1, 2, 3], "target": TOKENS}
    settings |= change(layers, rank)
    schedule = Interlocking(settings.pop("window"), settings.pop("heads"))
    target = settings.pop("target")
    if settings.get("num_stages") == 8:
        layers = [*layers, *build_layers()]
    try:
        trainer = PipelineTrainer(layers, loss_fn, sgd, schedule, num_microbatches=1, **settings)
        trainer.step(TOKENS, target)
        trainer.flush()  # no rank leaves while another still receives
    except ValueError as error:
        after = [p for layer in layers for p in layer.parameters()]
        assert all(map(torch.equal, before, after))
        return f"{type(error).__name__}: {error}"
    return "trained"


def only_on(rank, mistake):
    return lambda layers, own: mistake if own == rank else {}


def tied(stage, embedding):
    return [*[LinearHead(11)] * stage, TiedHead(embedding), *[LinearHead(11)] * (2 - stage)]


def copies(head):
    return [LinearHead(11), nn.Sequential(head, nn.Linear(6, 11)), LinearHead(11)]


FITS = "heads must return outputs that loss_fn takes: that of stage"
SHARE = "heads must share an embedding of their own or an earlier stage, got one of"
LAYERS = "heads must not hold parameters of the layers, as they learn from another loss, got one of"
MISTAKES = {  # on all ranks, or on one; more of heads: test_heads.py and test_build_heads.py
    "a window beyond the last stage": (
        lambda *_: {"window": 5},
        "window must be from 1 to the number of stages, 4, got 5"),
    "too few outputs": (
        lambda *_: {"heads": [LinearHead(11), LinearHead(11), LinearHead(9)]},
        f"{FITS} 2, LinearHead(num_outputs=9, norm=None), returns a tensor of shape [3, 5, 9] "
        "and torch.float32 for a tensor of shape [3, 5, 6] and torch.float32, the target is a "
        "tensor of shape [3, 5] and torch.int64: IndexError: Target 10 is out of bounds."),
    "a parameter of its stage": (
        lambda layers, _: {"heads": copies(layers[1])}, f"{LAYERS} stage 1 in the head of stage 1"),
    "a parameter of another stage": (
        lambda layers, _: {"heads": copies(layers[2])}, f"{LAYERS} stage 2 in the head of stage 1"),
    "an embedding of a later stage": (
        lambda layers, _: {"heads": tied(1, layers[3][0].table), "window": 1},
        f"{SHARE} stage 3 in the head of stage 1"),
    "an embedding of no stage": (
        lambda *_: {"heads": tied(1, nn.Embedding(11, 6))}, f"{SHARE} no stage in the head of "
        "stage 1"),
    "two embeddings": (
        lambda layers, _: {"heads": [TiedHead(layers[0]), *tied(1, nn.Embedding(11, 6))[1:]]},
        "heads must share one embedding, got several"),
    "two stages on a rank": (
        lambda layers, _: {"heads": LinearHead(11), "num_stages": 8, "split": None},
        "Interlocking must have one stage on each rank, or all of them in one process, got 8 "
        "stages on 4 ranks"),
    "no target on one rank": (
        only_on(1, {"target": None}),
        "target must be given on the rank of the last stage, with Interlocking on every rank, got "
        "None"),
    "another window on one rank": (
        only_on(2, {"window": 3}), "all ranks must have the same schedule, got Interlocking("),
    "other heads on one rank": (
        only_on(0, {"heads": LinearHead(11, nn.LayerNorm)}),
        "all ranks must have the same schedule, got Interlocking("),
    "a norm of the whole gradient": (
        lambda *_: {"max_norm": 1.0},
        "max_norm must be None with Interlocking, whose stages learn from several losses, got 1.0: "
        "clip a stage's own gradient in a hook of its optimizer (register_step_pre_hook)"),
}  # fmt: skip


def train_with_each_mistake(rank):
    return {name: train(rank, change) for name, (change, _) in MISTAKES.items()} | {
        "none": train(rank, lambda *_: {})
    }


@pytest.fixture(scope="module")
def outcomes(ranks):
    return ranks.run(4, train_with_each_mistake)


def test_a_mistake_is_one_error_on_every_rank_and_nothing_is_trained(outcomes, subtests):
    for name in MISTAKES:
        with subtests.test(name=name):
            (found,) = {outcome[name] for outcome in outcomes}
            assert found.startswith("DisagreementError: ")
            assert MISTAKES[name][1] in found


def test_training_works_after_mistakes(outcomes):
    assert {outcome["none"] for outcome in outcomes} == {"trained"}


OF_RANKS = {"no target on one rank", "another window on one rank", "other heads on one rank",
            "two stages on a rank"}  # fmt: skip


def test_a_mistake_is_the_same_error_in_one_process(subtests):
    for name in [each for each in MISTAKES if each not in OF_RANKS]:
        with subtests.test(name=name):
            change, message = MISTAKES[name]
            found = train(0, change)
            assert found.startswith("ValueError: ")
            assert message in found


def test_prepare_builds_the_stages_once():
    layers = build_layers()
    trainer = PipelineTrainer(
        layers, loss_fn, sgd, Interlocking(2, LinearHead(11)), num_microbatches=1, split=[1, 2, 3]
    )
    with pytest.raises(RuntimeError, match=r"^stages must come after the first step or prepare"):
        trainer.stages  # noqa: B018
    before = [p.clone() for layer in layers for p in layer.parameters()]
    trainer.prepare(TOKENS, TOKENS)
    assert len(trainer.stages) == 4
    first = [stage.optimizer for stage in trainer.stages]
    trainer.prepare(TOKENS, TOKENS)
    assert [stage.optimizer for stage in trainer.stages] == first
    assert all(map(torch.equal, before, [p for layer in layers for p in layer.parameters()]))
