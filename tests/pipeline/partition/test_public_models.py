"""Models of transformers, timm and torchvision in stages train as the unsplit model does."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pyparallel.pipeline import (
    Displacement,
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeOptim,
    split_model,
)
from tests.cases import slow
from tests.pipeline import reference
from tests.pipeline.oracles import LastStep
from tests.pipeline.partition.public_models import (
    LANGUAGE_MODELS,
    build_ids,
    build_llama,
    build_timm,
    build_torchvision,
    next_token_loss,
    padded,
)

SPLITS = {2: [2], 4: [1, 3, 4]}  # of five layers
FLUSHING = [GPipe(), OneForwardOneBackward()]
STREAMING = [PipeDream(), PipeOptim("live"), PipeOptim("consistent")]
RESNETS = {"timm": build_timm, "torchvision": build_torchvision}
NUM_STEPS, NUM_MICROBATCHES = 3, 4


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(samples=9):
    """Return the ids of a few steps; the last microbatches have fewer samples."""
    return [build_ids(samples).roll(step, 0) for step in range(NUM_STEPS)]


def build_trainer(model, loss_fn, schedule, num_stages):
    return PipelineTrainer(
        split_model(model), loss_fn, momentum, schedule,
        num_microbatches=NUM_MICROBATCHES, split=SPLITS[num_stages],
    )  # fmt: skip


def train_language_model(family, schedule, num_stages):
    """Return losses, the loss of an evaluation, and the whole state on rank 0."""
    model = LANGUAGE_MODELS[family](**UNDROPPED[family]).double()
    trainer = build_trainer(model, next_token_loss, schedule, num_stages)
    losses = [trainer.step(input_ids=ids, **padded(ids), target=ids) for ids in batches()]
    ids = build_ids()
    losses.append(trainer.evaluate(ids, target=ids, **padded(ids)))
    with pytest.raises(ValueError, match=r"attention_mask must be of shape .* got \[9, 11\]; blo"):
        trainer.step(batches()[0], attention_mask=torch.ones(9, 11), target=batches()[0])
    return losses, trainer.full_state_dict()


UNDROPPED = {  # each rank has random numbers of its own; GPT-2's embedding is tied to the head
    "GPT-2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Llama": {},
}


@cache
def language_model_alone(family):
    model = LANGUAGE_MODELS[family](**UNDROPPED[family]).double()

    def loss_of(ids):
        logits = model(input_ids=ids, use_cache=False, **padded(ids)).logits
        return next_token_loss(logits, ids)

    return (*train_alone(model, loss_of), loss_of(build_ids()).item())


def train_alone(model, loss_of):
    """Return the model, trained by a plain loop, and its losses."""
    optimizer, losses = momentum(model.parameters()), []
    for ids in batches():
        loss = loss_of(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


class FromIds(nn.Module):
    """The first layer with arguments that follow from the ids."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, ids):
        return self.layer(ids, **padded(ids))


def build_layers():
    first, *rest = split_model(build_llama().double())
    return [FromIds(first), *rest]


def train_streaming(schedule, num_stages):
    """Return losses and the state of this rank's stages, under names of layers."""
    if isinstance(schedule, PipeOptim):  # the ops that predict take no float64
        schedule = replace(schedule, prediction=Displacement(LastStep()))
    trainer = PipelineTrainer(
        build_layers(), next_token_loss, momentum, schedule,
        num_microbatches=NUM_MICROBATCHES, split=SPLITS[num_stages],
    )  # fmt: skip
    losses = [trainer.step(ids, ids) for ids in batches()]
    trainer.flush()
    state = {}
    for stage in trainer.stages:
        state |= {name: each.clone() for name, each in stage.module.state_dict().items()}
    return losses, state


@cache
def reference_of(schedule, num_stages):
    if isinstance(schedule, PipeOptim):
        schedule = replace(schedule, prediction=Displacement())
    streams = [[(ids, ids) for ids in batches()]]
    return reference.train_in_one_process(
        build_layers, SPLITS[num_stages], next_token_loss, momentum, schedule, streams,
        NUM_MICROBATCHES,
    )  # fmt: skip


def images_of(ids):
    generator = torch.Generator().manual_seed(int(ids.sum()))
    return torch.randn(len(ids), 3, 33, 33, dtype=torch.float64, generator=generator)


def image_loss(logits, ids):
    return cross_entropy(logits, ids[:, 0] % 5)


def train_resnet(name, schedule, num_stages):
    model = RESNETS[name]().double()
    trainer = PipelineTrainer(
        split_model(model), image_loss, momentum, schedule,
        num_microbatches=NUM_MICROBATCHES, split=[2] if num_stages == 2 else [2, 4, 6],
    )  # fmt: skip
    losses = [trainer.step(images_of(ids), ids) for ids in batches(8)]
    return losses, trainer.full_state_dict()


def resnet_alone(name):
    """Train with the statistics of microbatches, as a loop that accumulates gradients does."""
    model, losses = RESNETS[name]().double(), []
    optimizer = momentum(model.parameters())
    for ids in batches(8):
        parts = zip(images_of(ids).tensor_split(4), ids.tensor_split(4), strict=True)
        of_parts = [image_loss(model(images), part) for images, part in parts]
        loss = torch.stack(of_parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def train_all(rank, num_stages):
    """Return what each training has returned, in the order of the tests below."""
    del rank
    return (
        [train_language_model(f, s, num_stages) for f in LANGUAGE_MODELS for s in FLUSHING],
        [train_streaming(schedule, num_stages) for schedule in STREAMING],
        [train_resnet(name, FLUSHING[-1], num_stages) for name in RESNETS],
    )


@cache
def results(ranks, num_stages, num_ranks):
    if num_ranks == 1:
        return [train_all(0, num_stages)]
    return ranks.run(num_ranks, train_all, num_stages, time_limit=150)


# Each rank would import the libraries, which takes longer than all that it trains.
SIZES = pytest.mark.parametrize(("num_stages", "num_ranks"), [(4, 1), slow(2, 2), slow(4, 4)])


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@SIZES
def test_language_models_train_as_the_unsplit_ones(num_stages, num_ranks, ranks):
    every = results(ranks, num_stages, num_ranks)
    cases = [(family, schedule) for family in LANGUAGE_MODELS for schedule in FLUSHING]
    for index, (family, _) in enumerate(cases):
        model, losses, evaluated = language_model_alone(family)
        found = every[-1][0][index][0]
        assert found == pytest.approx([*losses, evaluated], rel=1e-12)
        assert losses[-1] < losses[0]
        assert_close(every[0][0][index][1], model.state_dict())


@SIZES
def test_a_llama_streams_as_its_reference(num_stages, num_ranks, ranks):
    every = results(ranks, num_stages, num_ranks)
    for index, schedule in enumerate(STREAMING):
        wanted = reference_of(schedule, num_stages)
        assert every[-1][1][index][0] == pytest.approx(wanted.losses, rel=1e-12)
        states = [rank[1][index][1] for rank in every]
        found = {name: each for state in states for name, each in state.items()}
        assert_close(found, dict(wanted.state))


@SIZES
def test_resnets_train_as_the_unsplit_ones(num_stages, num_ranks, ranks):
    every = results(ranks, num_stages, num_ranks)
    for index, name in enumerate(RESNETS):
        state, losses = resnet_alone(name)
        assert every[-1][2][index][0] == pytest.approx(losses, rel=1e-12)
        assert_close(every[0][2][index][1], state)
