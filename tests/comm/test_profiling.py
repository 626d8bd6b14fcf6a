"""Profiles that end while messages are in flight, kept alive as users keep them."""

import gc

from torch.profiler import ProfilerActivity, profile

from tests.comm import trainers
from tests.workers import observe_ranks


def profile_steps(rank):
    """Return the names in the last profiles of both trainers."""
    names = set()
    for trainer, step in (trainers.gossip(), trainers.pipeline(split=[1])):
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
