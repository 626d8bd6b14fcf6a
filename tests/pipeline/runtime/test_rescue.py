"""What rescue_state_dict returns after a failure, against the reference up to each stage's update.

A new trainer loads it and goes on.
"""

import copy
import itertools
import warnings
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import (
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeOptim,
    StageError,
)
from tests.pipeline import reference
from tests.pipeline.faults import die, raise_error, raise_in_backward
from tests.pipeline.jobs import IN_ANY_DTYPE
from tests.workers import observe_ranks

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


WIDTH, NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 3, 4, 3, 6
SPLIT = [2, 4, 6]
SEEN_BEFORE = 10  # microbatches before the fault: it is in the fourth step


class Faulty(nn.Module):
    """An identity that applies a fault to one microbatch."""

    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        return self.fault(x) if self.fault and self.seen == SEEN_BEFORE + 1 else x


def build_layers(fault=None, at=None):
    torch.manual_seed(4)
    layers = []
    for stage in range(NUM_STAGES):
        layers += [nn.Linear(WIDTH, WIDTH).double(), Faulty(fault if stage == at else None)]
    return layers


def build_calls():
    generator = torch.Generator().manual_seed(5)
    pairs = torch.randn(NUM_STEPS, 2, 5, WIDTH, generator=generator, dtype=torch.float64)
    return [(inputs, target) for inputs, target in pairs]


def build(schedule, fault=None, at=None, optimizer_fn=sgd):
    return PipelineTrainer(
        build_layers(fault, at), mse_loss, optimizer_fn, schedule,
        num_microbatches=NUM_MICROBATCHES, split=SPLIT,
    )  # fmt: skip


def interrupt(x):
    raise KeyboardInterrupt


def half_step_on_stage_2(parameters):
    """Return an optimizer whose fourth step on stage 2 fails when it has written a parameter."""
    optimizer, count = sgd(parameters), itertools.count(1)

    def hook(*ignored):
        if next(count) == 4:
            with torch.no_grad():
                parameters[0].zero_()
            raise ArithmeticError("in the middle")

    if torch.equal(parameters[0], build_layers()[4].weight):
        optimizer.register_step_pre_hook(hook)
    return optimizer


FAULTS = {
    "forward": {"fault": raise_error, "at": 2},
    "backward": {"fault": raise_in_backward, "at": 0},
    "interrupt": {"fault": interrupt, "at": 1},
    "update": {"optimizer_fn": half_step_on_stage_2},
}
# Every schedule with one fault, and 1F1B and three others with each of the rest.
JOBS = [(schedule, "backward") for schedule in IN_ANY_DTYPE]
JOBS += [
    (schedule, fault) for schedule in IN_ANY_DTYPE[1::4] for fault in FAULTS if fault != "backward"
]


def train(trainer, calls):
    losses = [trainer.step(*call) for call in calls]
    trainer.flush()
    return losses


def fail(trainer):
    """Train until the failure."""
    with pytest.raises((StageError, KeyboardInterrupt)):
        train(trainer, build_calls())
    with pytest.raises(RuntimeError, match=r"create a new PipelineTrainer.* rescue_state_dict\(\)"):
        trainer.state_dict()


def rescue_and_go_on(rank, schedule, fault):
    """Return the rescued state, the warnings, and the losses and state of a new trainer."""
    trainer = build(schedule, **FAULTS[fault])
    fail(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = copy.deepcopy(trainer.rescue_state_dict())
    new = build(schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a stage that is half updated
        new.load_state_dict(copy.deepcopy(state))  # torch keeps the tensors that it loads
    loaded = copy.deepcopy(new.state_dict())
    build(schedule).load_state_dict(loaded)  # of one step on all ranks
    losses = train(new, build_calls()[SEEN_BEFORE // NUM_MICROBATCHES :])
    return state, loaded, [str(each.message) for each in caught], losses, new.state_dict()


def work(rank, jobs):
    return [rescue_and_go_on(rank, *job) for job in jobs]


@cache
def trained(schedule):
    return reference.train_in_one_process(
        build_layers, SPLIT, mse_loss, sgd, schedule, [build_calls()], NUM_MICROBATCHES
    )


def assert_like_version(saved, stage):
    """Compare a saved stage with the reference's after as many updates."""
    version = [*stage.past, *stage.history][saved["updates"]]
    torch.testing.assert_close(saved["module"], version.weights(), rtol=1e-12, atol=1e-12)
    (optimizer,) = version.optimizers
    wanted = optimizer.state_dict()["state"]
    (state,) = (each["state"] for each in saved["optimizers"])
    assert state.keys() == wanted.keys()
    for index, each in wanted.items():
        momentum = state[index]["momentum_buffer"]
        torch.testing.assert_close(momentum, each["momentum_buffer"], rtol=1e-12, atol=1e-12)


def assert_equal(left, right):
    for number, saved in left.items():
        torch.testing.assert_close(saved["module"], right[number]["module"], rtol=0, atol=0)


@pytest.mark.slow  # 13 seconds
def test_every_schedule_is_rescued_after_a_failure_and_goes_on(ranks, subtests):
    by_rank = ranks.run(2, work, JOBS, time_limit=150)
    for (schedule, fault), first, second in zip(JOBS, *by_rank, strict=True):
        with subtests.test(f"{schedule!r} {fault}"):
            rescued, loaded = ({**first[i], **second[i]} for i in range(2))
            half = {number for number, saved in rescued.items() if saved["half_updated"]}
            assert half == ({"2"} if fault == "update" else set())
            for number, saved in rescued.items():
                assert saved["rescued"]
                if number not in half:
                    assert_like_version(saved, trained(schedule).stages[int(number)])
            assert rescued["2"]["updates"] >= 2
            assert_equal(loaded, rescued)
            (warned,) = [*first[2], *second[2]] or ["none"]
            assert ("inside of an update of stage 2, which may" in warned) == bool(half)
            assert all(0 < loss < 10 for loss in second[3])
            updates = {saved["updates"] for saved in rescued.values()}
            if schedule == OneForwardOneBackward() and fault == "forward":
                assert updates == {3}  # so that the rest is as if nothing had failed
                stages = trained(schedule).stages
                for number, saved in {**first[4], **second[4]}.items():
                    assert saved["updates"] == NUM_STEPS
                    assert_like_version(saved, stages[int(number)])


def lose_rank_1(rank, schedule):
    """Return the checkpoint of the first step, and the state that is rescued later."""
    trainer = build(schedule, fault=die, at=3)
    train(trainer, build_calls()[:1])
    checkpoint = copy.deepcopy(trainer.state_dict())
    if rank == 1:
        torch.save(checkpoint, "checkpoint.pt")
    with pytest.raises(StageError):
        train(trainer, build_calls()[1:])
    return trainer.rescue_state_dict()


def load_mixed(rank, schedule, states):
    trainer = build(schedule)
    trainer.load_state_dict(states[rank])
    return train(trainer, build_calls())


def test_survivors_of_a_killed_rank_are_rescued(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule = PipeDream()
    survivor, killed = observe_ranks(2, lose_rank_1, schedule, time_limit=150, group_timeout=20)
    assert killed.error.startswith("ended without a result")
    rescued = survivor.value
    assert {number: saved["rescued"] for number, saved in rescued.items()} == {"0": True, "2": True}
    assert all(saved["updates"] > NUM_MICROBATCHES for saved in rescued.values())
    states = [rescued, torch.load(tmp_path / "checkpoint.pt")]  # of other steps
    assert ranks.run(2, load_mixed, schedule, states)[1][0] > 0


def test_there_is_nothing_to_rescue_before_the_stages_are_built():
    trainer = PipelineTrainer(
        build_layers(), mse_loss, sgd, PipeOptim(), num_microbatches=3, num_stages=4
    )
    with pytest.raises(RuntimeError, match=r"which builds the stages, got none yet$"):
        trainer.rescue_state_dict()


def test_weights_are_live_wherever_an_interrupt_has_left_the_parameters():
    trainer = build(PipeDream())
    for call in build_calls():
        trainer.step(*call)
    live = [p.detach().clone() for p in trainer.stages[0].module.parameters()]
    weights = trainer.stages[0].weights
    (stashed, *_) = weights._copies.values()
    first, *_ = trainer.stages[0].module.parameters()
    first.data = stashed.views[0]  # as in the middle of point_to
    assert not torch.equal(first, live[0])
    saved = trainer.rescue_state_dict()["0"]["module"]
    for found, wanted in zip(saved.values(), live, strict=True):
        assert torch.equal(found, wanted)
