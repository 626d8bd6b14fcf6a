"""Tied weights and skip connections against the unsplit model."""

import re
from functools import cache, partial
from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear

from pyparallel.compression import Cast
from pyparallel.pipeline import (
    Displacement,
    GPipe,
    Interleaved,
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
    Skippable,
    ZeroBubble,
)
from tests.cases import slow
from tests.pipeline import reference
from tests.pipeline.jobs import Trained, train_on
from tests.pipeline.oracles import LastStep

sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01)


WORDS, WIDTH, NUM_MICROBATCHES = 7, 6, 4
FLUSHING = [GPipe(), OneForwardOneBackward(), ZeroBubble(), Interleaved()]
OPTIONS = [(None, 1), (0.1, 1), (0.1, 3)]  # the norm, and accumulated steps
EVERY_CASE = [(schedule, *options) for schedule, options in product(FLUSHING, OPTIONS)]
COVERING = [(each, *options) for each, options in zip(FLUSHING, cycle(OPTIONS), strict=False)]
LAST_STEP = Displacement(LastStep())  # the ops take no float64
SPLITS = {2: [3], 3: [2, 5], 4: [1, 3, 5]}  # by the number of stages
STREAMING = [  # with the norm that gradients are clipped to
    (PipeDream(), None),
    (PipeDream2BW(), 0.1),
    (PipeOptim("live", prediction=LAST_STEP), 0.1),
    (PipeOptim("consistent", prediction=LAST_STEP), None),
]


class Add(nn.Module):
    """A block that also takes an earlier block's output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value, skip):
        return self.linear(value).tanh() * skip


def build_layers():
    """An embedding tied to the head, with a skip connection from layer 1 to layer 4."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WORDS, bias=False)
    embedding = nn.Embedding(WORDS, WIDTH)
    head.weight = embedding.weight
    layers = [
        embedding,
        Skippable(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), stash="high"),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        Skippable(Add(), pop="high"),
        nn.Linear(WIDTH, WIDTH),
        head,
    ]
    return [layer.double() for layer in layers]


class Plain(nn.Module):
    """The same model, unsplit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*build_layers())

    def forward(self, words):
        embedding, down, middle, norm, up, last, head = self.layers
        high = down.module(embedding(words))
        return head(last(up.module(norm(middle(high)), high)))


def loss_fn(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def batches(number=3):
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randint(WORDS, (8, 5), generator=generator) for _ in range(2))
        for _ in range(number)
    ]


def train(case, num_stages):
    """Return the losses of steps and then of an evaluation, and the state."""
    schedule, max_norm, *accumulated = case
    layers = build_layers()
    if dist.get_rank():
        nn.init.ones_(layers[-1].weight)  # the rank of the first stage decides
    trainer = PipelineTrainer(
        layers, loss_fn, sgd, schedule,
        num_microbatches=NUM_MICROBATCHES, split=SPLITS[num_stages], max_norm=max_norm,
        gradient_accumulation_steps=sum(accumulated) or 1,
    )  # fmt: skip
    done = Trained([trainer.step(*batch) for batch in batches()])
    trainer.flush()
    for stage in trainer.stages:
        done.state |= {name: value.clone() for name, value in stage.module.state_dict().items()}
    done.losses.append(trainer.evaluate(*batches(1)[0]))
    return done


@cache
def train_unsplit(max_norm, accumulated):
    model = Plain()
    optimizer, losses = sgd(model.parameters()), []
    for words, target in batches():
        loss = loss_fn(model(words), target)
        (loss / accumulated).backward()
        losses.append(loss.item())
        if len(losses) % accumulated == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    words, target = batches(1)[0]
    losses.append(loss_fn(model(words), target).item())
    return losses, model.layers.state_dict()


def check_equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "cases"), [((2, 2), COVERING), slow((3, 1), EVERY_CASE), slow((4, 4), EVERY_CASE)]
)
def test_schedules_that_flush_train_as_the_unsplit_model(size, cases, ranks, subtests):
    for case, found in zip(cases, train_on(ranks, size, train, cases), strict=True):
        with subtests.test(str(case)):
            losses, state = train_unsplit(*case[1:])
            check_equal(found.losses, losses)
            check_equal(found.state, dict(state))
            assert torch.equal(found.state["0.weight"], found.state["6.weight"])


class Carried(nn.Module):
    """A layer of the reference: everything that skips layers is a part of its value."""

    def __init__(self, layer, kind):
        super().__init__()
        self.layer = layer
        self.kind = kind

    def forward(self, value):
        if self.kind == "embedding":
            return self.layer(value), self.layer.weight.clone()
        value, weight, *high = value
        if self.kind == "head":
            return linear(value, weight)
        if self.kind == "up":
            return self.layer.module(value, *high), weight
        value = self.layer(value)
        return (value, weight, value) if self.kind == "down" else (value, weight, *high)


def build_reference_layers():
    layers = build_layers()
    layers[-1] = nn.Identity()
    kinds = ["embedding", "down", "", "", "up", "", "head"]
    return [Carried(layer, kind) for layer, kind in zip(layers, kinds, strict=True)]


@pytest.mark.parametrize("size", [(3, 1), (2, 2), slow((4, 4))])
def test_schedules_that_do_not_flush_carry_the_weight_that_the_first_stage_reads(
    size, ranks, subtests
):
    trained = train_on(ranks, size, train, STREAMING)
    for (schedule, max_norm), found in zip(STREAMING, trained, strict=True):
        with subtests.test(f"{schedule}"):
            wanted = reference.train_in_one_process(
                build_reference_layers, SPLITS[size[0]], loss_fn, sgd, schedule, [batches()],
                NUM_MICROBATCHES, max_norm=max_norm,
            )  # fmt: skip
            weights = {name.replace(".layer", ""): w for name, w in wanted.state.items()}
            weights["6.weight"] = weights["0.weight"]
            check_equal(found.losses[:-1], wanted.losses)
            check_equal(found.state, weights)


def make_mistakes(rank):
    """Return the error of each mistake, and the loss of a trainer built after them."""
    errors = []
    for schedule, options in [
        (Interlocking(1, LinearHead(WORDS)), {}),
        (PipeDream(), {"compress_activations": Cast()}),
        (PipeDream(), {"compress_gradients": Cast()}),
    ]:
        try:
            trainer = PipelineTrainer(
                build_layers(), loss_fn, sgd, schedule,
                num_microbatches=NUM_MICROBATCHES, split=[3], **options,
            )  # fmt: skip
            trainer.prepare(*batches()[0])
        except ValueError as error:
            errors.append(str(error))
    with torch.device("cpu" if rank == 0 else "meta"):
        embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    untied = nn.Linear(WIDTH, WORDS, bias=False) if rank else head
    for last in (head, untied):
        try:
            PipelineTrainer(
                [embedding, last], loss_fn, sgd, OneForwardOneBackward(),
                num_microbatches=NUM_MICROBATCHES, split=[1],
            )  # fmt: skip
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_a_tie_that_cannot_be_trained_is_one_error_on_every_rank(ranks):
    first, second = ranks.run(2, make_mistakes)
    assert first == second
    interlocking, *compressed, on_meta, untied = first
    tie = r"got 6.weight of shape \[7, 6\] on stages 0 and 1"
    assert re.match(f"ranks 0-1: layers must not share parameters .* {tie}", interlocking)
    for name, error in zip(("activations", "gradients"), compressed, strict=True):
        assert re.match(f"ranks 0-1: compress_{name} must be None .* {tie}", error)
    rule = "rank 1: layers must be in memory on the rank of their stage, got 1.weight on the meta"
    assert on_meta.startswith(rule)
    assert untied.startswith("all ranks must have the same tied weights, got [")


def split_by_times(rank):
    trainer = PipelineTrainer(
        build_layers(), loss_fn, sgd, OneForwardOneBackward(), num_microbatches=NUM_MICROBATCHES
    )
    trainer.step(*batches()[0])
    return trainer.split


def test_an_automatic_split_may_cut_ties_and_skips(ranks):
    first, second = ranks.run(2, split_by_times)
    assert first == second
    assert len(first) == 1
