"""ModelAverager's defaults, no_sync and join, and what WrappedAverager forwards; no processes."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.comm import ModelAverager, StepCounts, WrappedAverager


class Recording(ModelAverager):
    """Records the names of the methods that are called."""

    in_flight = False

    def __init__(self, buffers, process_group=None):
        super().__init__(buffers, process_group)
        self.called = []
        self.bytes_per_step = 8

    def __getattribute__(self, name):
        if name in HOOKS:
            self.called.append(name)
        return super().__getattribute__(name)

    def after_step(self):
        self._bytes_sent += self.bytes_per_step

    def state_dict(self):
        return {"round": 3}

    def as_merged(self):
        return [torch.full((2,), 7.0)], torch.tensor(0.5)


HOOKS = [
    "restore_debiased",
    "before_step",
    "before_update",
    "after_update",
    "after_step",
    "flush",
    "load_state_dict",
    "reset",
]


def test_by_default_nothing_is_communicated_or_changed():
    values = torch.arange(3.0)
    averager = ModelAverager([values])
    module = nn.Linear(2, 2)
    for hook in HOOKS:
        assert getattr(averager, hook)(*([{}] if hook == "load_state_dict" else [])) is None
    averager.record_loss(torch.tensor(1.0))
    averager.close()
    merged, weight = averager.as_merged()
    assert merged[0] is values
    assert values.tolist() == [0, 1, 2]
    assert weight.dtype == torch.float64
    assert float(weight) == float(averager.weight) == 1.0
    assert averager.bytes_sent == 0
    assert averager.wrap(module) is module
    assert not averager.in_flight
    assert averager.state_dict() == {}
    assert averager.can_be_inner


def test_no_sync_nests_and_ends_with_an_exception():
    averager = ModelAverager([torch.zeros(1)])
    assert averager.synchronizes
    with averager.no_sync():
        with averager.no_sync():
            assert not averager.synchronizes
        assert not averager.synchronizes
    with pytest.raises(KeyError), averager.no_sync():
        raise KeyError
    assert averager.synchronizes


def test_a_rank_without_batches_receives_and_sends_in_each_step_of_the_others():
    averager = Recording([torch.zeros(1)])
    averager.join_hook().main_hook()
    assert averager.called == ["before_step", "after_step"]
    assert averager.joinable is averager
    assert averager.join_device == torch.device("cpu")


def test_ranks_join_in_the_process_group_or_in_the_default_one():
    group = dist.ProcessGroup(0, 1)
    assert ModelAverager([torch.zeros(1)], group).join_process_group is group
    assert ModelAverager([torch.zeros(1)]).join_process_group is dist.group.WORLD
    ModelAverager([torch.zeros(1)]).notify_joined_ranks()  # outside of join() there are none


def test_a_wrapped_averager_forwards_every_hook_once():
    inner = Recording([torch.zeros(2)])
    wrapped = WrappedAverager(inner)
    for hook in HOOKS:
        getattr(wrapped, hook)(*([{}] if hook == "load_state_dict" else []))
    assert inner.called == HOOKS
    assert wrapped.state_dict() == {"round": 3}
    inner.in_flight = True
    assert wrapped.in_flight
    wrapped.counts = StepCounts(steps=3)
    assert inner.counts is wrapped.counts
    merged, weight = wrapped.as_merged()
    assert merged[0].tolist() == [7, 7]
    assert weight == 0.5
    inner._weight.fill_(0.25)
    assert wrapped.weight is inner.weight
    assert wrapped.buffers[0] is inner.buffers[0]
    assert WrappedAverager(inner, [torch.ones(5)]).buffers[0].tolist() == [1] * 5


def test_a_wrapped_averager_adds_its_own_bytes():
    wrapped = WrappedAverager(Recording([torch.zeros(2)]))
    wrapped.after_step()
    wrapped._bytes_sent += 100
    wrapped.after_step()
    assert wrapped.bytes_sent == 2 * 8 + 100


def test_a_wrapped_averager_forwards_all_but_what_is_the_trainers():
    # A new method must be forwarded, or be named here: the inner algorithm would not see it.
    own = {name for name, each in vars(ModelAverager).items() if inspect.isroutine(each)}
    forwarded = set(vars(WrappedAverager))
    assert own - forwarded == {
        "close",
        "join_hook",
        "no_sync",
        "notify_joined_ranks",
        "record_loss",
        "shadow_step",
        "step_buckets",  # the default calls the wrapper's own methods, which forward
        "wrap",
    }
