"""ModelAverager's defaults, alone and around another one; no processes."""

import inspect

import pytest
import torch
from torch import nn

from pyparallel.comm import Run
from pyparallel.training import ModelAverager, SavedProgress, Status

HOOKS = [
    "restore_debiased",
    "before_step",
    "before_update",
    "after_update",
    "after_step",
    "flush",
    "load_state_dict",
    "reset",
    "close",
]


class Recording(ModelAverager):
    """Records the names of the methods that are called."""

    def __init__(self, buffers, run=None):
        super().__init__(buffers, run)
        self.called = []

    def __getattribute__(self, name):
        if name in HOOKS:
            self.called.append(name)
        return super().__getattribute__(name)

    @property
    def status(self):
        return Status(torch.tensor(0.25), 2, True)

    def state_dict(self):
        return {"round": 3}

    def check_state(self, state):
        return SavedProgress({"round": 3}, 0.5)

    def as_merged(self):
        return [torch.full((2,), 7.0)], torch.tensor(0.5)


def call(averager, hook):
    return getattr(averager, hook)(*([{}] if hook == "load_state_dict" else []))


def test_by_default_nothing_is_communicated_or_changed():
    values = torch.arange(3.0)
    averager = ModelAverager([values])
    module = nn.Linear(2, 2)
    for hook in HOOKS:
        assert call(averager, hook) is None
    merged, weight = averager.as_merged()
    assert merged[0] is values
    assert values.tolist() == [0, 1, 2]
    assert weight.dtype == torch.float64
    assert averager.status == Status(weight, 0, False)
    assert float(weight) == 1.0
    assert averager.run.stats.wire_bytes == 0
    assert averager.wrap(module) is module
    assert averager.state_dict() == {}
    assert averager.check_state({}) == SavedProgress({}, 1.0)
    assert averager.joinable is None


def test_a_step_of_buckets_is_all_of_a_step_and_omits_the_end_inside_no_sync():
    averager, seen = Recording([torch.zeros(1)]), []
    averager.step_buckets(seen.append, 2)
    with averager.run.counts.no_sync():
        averager.step_buckets(seen.append, 1)
    steps = ["before_step", "before_update", "after_update"]
    assert averager.called == [*steps, "after_step", *steps]
    assert seen == [0, 1, 0]


def test_no_sync_nests_and_ends_with_an_exception():
    run = Run()
    assert run.counts.synchronizes
    with run.counts.no_sync():
        with run.counts.no_sync():
            assert not run.counts.synchronizes
        assert not run.counts.synchronizes
    with pytest.raises(KeyError), run.counts.no_sync():
        raise KeyError
    assert run.counts.synchronizes


def test_around_another_one_it_does_what_that_does():
    inner = Recording([torch.zeros(2)])
    outer = ModelAverager(inner.buffers, inner=inner)
    for hook in HOOKS:
        call(outer, hook)
    assert inner.called == HOOKS
    assert outer.state_dict() == {"round": 3}
    assert outer.check_state({}) == SavedProgress({"round": 3}, 0.5)
    assert outer.status == inner.status
    assert outer.run is inner.run
    merged, weight = outer.as_merged()
    assert merged[0].tolist() == [7, 7]
    assert weight == 0.5
    assert ModelAverager([torch.ones(5)], inner=inner).buffers[0].tolist() == [1] * 5


def test_around_another_one_every_method_is_that_ones():
    # A new method must be forwarded, or be named here: the inner algorithm would not see it.
    own = {name for name, each in vars(ModelAverager).items() if inspect.isroutine(each)}
    forwarded = {*HOOKS, "state_dict", "check_state", "as_merged"}
    assert own - forwarded == {
        "__init__",
        "as_evaluated",  # the default is the averager's own as_merged, which forwards
        "step_buckets",  # the default calls the averager's own methods, which forward
        "wrap",  # an inner algorithm communicates in steps alone
    }
