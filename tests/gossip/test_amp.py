"""AMP's GradScaler: a rank that skips a step alone still takes its round."""

import pytest
import torch

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP
from pyparallel.gossip.topology import Ring
from tests.gossip.loops import batches, build_model, flat

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def train(model, optimizer, data, forward=None, spoiled=None, clips=False):
    """Train with a loss scale of 2**16; in step ``spoiled`` one gradient is inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    for step, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss((forward or model)(inputs), targets)
        scaler.scale(loss).backward()
        if step == spoiled:
            next(model.parameters()).grad[0] = float("inf")
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        assert all(parameter.grad is not None for parameter in model.parameters())
        scaler.update()
    return flat(model), scaler.get_scale()


def train_wrapped(rank, name, algorithm, spoiled, clips, same_data):
    model = build_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    wrapped = GossipDataParallel(model, optimizer, algorithm)
    data = list(batches(0 if same_data else rank, 8))
    spoiled = spoiled if rank == 0 or same_data else None
    result = train(model, optimizer, data, wrapped, spoiled, clips)
    wrapped.flush()
    return *result, flat(model), float(wrapped.push_sum_weight)


def train_alone(name, spoiled, clips):
    model = build_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    return train(model, optimizer, list(batches(0, 8)), spoiled=spoiled, clips=clips)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_training_alone_bit_for_bit(ranks, name):
    for clips in (False, True):
        alone, scale = train_alone(name, 4, clips)
        for result, its_scale, *_ in ranks.run(
            2, train_wrapped, name, SGP(Ring(2)), 4, clips, True
        ):
            assert torch.equal(result, alone), clips
            assert its_scale == scale


@pytest.mark.parametrize("name", ["sgd", "adamw, fused"])
def test_a_step_skipped_on_one_rank_does_not_stop_the_others(ranks, name):
    for overlap in (0, 1):
        algorithm = SGP(Ring(3), overlap=overlap)
        for _, _, flushed, weight in ranks.run(3, train_wrapped, name, algorithm, 4, False, False):
            assert weight == 1.0, overlap
            assert flushed.isfinite().all(), overlap


def close(rank):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = GossipDataParallel(model, optimizer, SGP(Ring(1)))
    inside = hasattr(optimizer, "_step_supports_amp_scaling")
    wrapped.close()
    return inside, hasattr(optimizer, "_step_supports_amp_scaling")


def test_close_restores_the_optimizer(ranks):
    assert ranks.run(1, close) == [(True, False)]
