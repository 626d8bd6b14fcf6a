"""Profiles that end while messages are in flight, kept alive as users keep them."""

import gc

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pyparallel import GossipDataParallel, PipelineTrainer
from pyparallel.gossip import SGP
from pyparallel.gossip.topology import Complete
from pyparallel.pipeline import PipeOptim
from tests.workers import observe_ranks


def start_gossip():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = GossipDataParallel(model, optimizer, SGP(Complete(2), overlap=1))

    def step():
        optimizer.zero_grad()
        trainer(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    return step, trainer


def start_pipeline():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizer_fn = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    trainer = PipelineTrainer(
        layers, nn.functional.mse_loss, optimizer_fn, PipeOptim(), num_microbatches=2, split=[1]
    )
    x = torch.ones(4, 4)
    return lambda: trainer.step(x, x), trainer


def profile_steps(rank):
    """Return the names in the last profiles of both trainers."""
    names = set()
    for start in (start_gossip, start_pipeline):
        step, trainer = start()
        profiles = []
        for _ in range(3):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as last:
                for _ in range(6):
                    step()
            profiles.append(last)  # freed memory is reused only if the profile is kept
            for _ in range(3):
                step()
            gc.collect()
        names |= {event.key for event in last.key_averages()}
        trainer.flush()
    return names


def test_messages_outlive_a_profile_which_has_our_ranges():
    for outcome in observe_ranks(2, profile_steps):
        assert outcome.error is None, outcome.log
        assert outcome.exit_code == 0
        assert {
            f"pyparallel::{name}"
            for name in (
                "gossip_send", "gossip_wait", "gossip_merge", "pipeline_forward",
                "pipeline_backward", "pipeline_update", "pipeline_wait",
            )
        } <= outcome.value  # fmt: skip
