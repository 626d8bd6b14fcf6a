"""Models of transformers, timm and torchvision in stages train as the unsplit model does."""

from functools import cache, partial
from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy

from pyparallel.pipeline import (
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeOptim,
    split_model,
)
from tests.cases import slow
from tests.pipeline.partition.public_models import (
    LANGUAGE_MODELS,
    WITH_WINDOWS,
    build_ids,
    build_timm,
    build_torchvision,
    next_token_loss,
    padded,
)

momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


SPLITS = {2: [2], 4: [1, 3, 4]}  # of five layers
FLUSHING = [GPipe(), OneForwardOneBackward()]
STREAMING = [PipeDream(), PipeOptim("live"), PipeOptim("consistent")]
RESNETS = {"timm": build_timm, "torchvision": build_torchvision}
NUM_STEPS, NUM_MICROBATCHES = 3, 4


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


def train_language_models(rank, num_stages):
    return [train_language_model(*case, num_stages) for case in product(LANGUAGE_MODELS, FLUSHING)]


def train_resnets(rank, num_stages):
    return [train_resnet(name, FLUSHING[-1], num_stages) for name in RESNETS]


def train_on(ranks, job, num_stages, num_ranks):
    """Return the last rank's losses of each model, and rank 0's states of the whole."""
    if num_ranks == 1:
        by_rank = [job(0, num_stages)]
    else:
        by_rank = ranks.run(num_ranks, job, num_stages, time_limit=150)
    return [
        (losses, state) for (losses, _), (_, state) in zip(by_rank[-1], by_rank[0], strict=True)
    ]


# Each rank would import the libraries, which takes longer than all that it trains.
SIZES = pytest.mark.parametrize("size", [(4, 1), slow((2, 2)), slow((4, 4))])  # stages, ranks


def assert_trained(found, losses, state):
    assert found[0] == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(found[1], state, rtol=1e-12, atol=1e-12)


@SIZES
def test_language_models_train_as_the_unsplit_ones(size, ranks):
    trained = train_on(ranks, train_language_models, *size)
    for (family, _), found in zip(product(LANGUAGE_MODELS, FLUSHING), trained, strict=True):
        model, losses, evaluated = language_model_alone(family)
        assert_trained(found, [*losses, evaluated], model.state_dict())
        assert losses[-1] < losses[0]


@pytest.mark.slow
@SIZES
def test_resnets_train_as_the_unsplit_ones(size, ranks):
    for name, found in zip(RESNETS, train_on(ranks, train_resnets, *size), strict=True):
        state, losses = resnet_alone(name)
        assert_trained(found, losses, state)


def train_and_save(rank, folder):
    """Return each model's losses on two ranks, before and after a step, and of the saved model."""
    losses = {}
    for name, build in WITH_WINDOWS.items():
        model, ids = build(), build_ids()
        trainer = PipelineTrainer(split_model(model), next_token_loss, momentum, split=[2])
        found = [trainer.evaluate(ids, target=ids)]
        trainer.step(ids, target=ids)
        found.append(trainer.evaluate(ids, target=ids))
        whole = build() if rank == 0 else None
        trainer.load_into(whole)
        if whole is not None:
            whole.save_pretrained(f"{folder}/{name}")
        losses[name] = found
    return losses


@pytest.mark.slow
def test_a_model_trained_on_two_ranks_is_saved_for_plain_transformers(ranks, tmp_path):
    _, losses = ranks.run(2, train_and_save, str(tmp_path), time_limit=150)
    for name, build in WITH_WINDOWS.items():
        untrained, ids = build().eval(), build_ids()
        loaded = type(untrained).from_pretrained(tmp_path / name).eval()
        own = [model(ids, labels=ids).loss.item() for model in (untrained, loaded)]
        assert losses[name] == pytest.approx(own, rel=1e-5)
        assert own[1] < own[0]
