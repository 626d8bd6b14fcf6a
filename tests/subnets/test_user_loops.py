"""Variations of the training loop: closures, gradient scaling, accumulation, errors, resuming."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.subnets import Partition, ResetState, SequentialChain
from tests.subnets.helpers.models import mlp
from tests.subnets.helpers.training import held
from tests.workers import assert_equal_on_all_ranks, call_each

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=0.01)


def make(optimizer_fn=sgd, interval=2, *, module=None, **options):
    torch.manual_seed(0)
    module = module or mlp(7, 13).double()
    return SubnetTrainer(module, optimizer_fn, Partition(seed=4), interval, **options)


def batch_of(step, rank, samples=8):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(samples, 5, generator=generator, dtype=torch.float64)


def loss_of(trainer, inputs):
    dtype = next(trainer.subnet.parameters()).dtype
    return trainer(inputs.to(dtype)).square().mean()


def train(trainer, steps, rank):
    for step in steps:
        trainer.optimizer.zero_grad()
        loss_of(trainer, batch_of(step, rank)).backward()
        trainer.optimizer.step()


def gap(left, right):
    assert left.keys() == right.keys()
    return max(float((left[key].double() - right[key].double()).abs().max()) for key in left)


def plain(rank):
    trainer = make()
    train(trainer, range(6), rank)
    return held(trainer)


def with_closures(rank):
    trainer = make()
    for step in range(6):

        def closure(step=step):
            trainer.optimizer.zero_grad()
            loss = loss_of(trainer, batch_of(step, rank))
            loss.backward()
            return loss

        trainer.optimizer.step(closure)
    return held(trainer)


def with_scaled_gradients(rank):
    """An infinite loss on one rank skips its step, but does not stop the other ranks."""
    trainer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(6):
        factors = [float("inf"), 1.0] if (rank, step) == (0, 3) else [1.0]
        for factor in factors:
            trainer.optimizer.zero_grad()
            scaler.scale(loss_of(trainer, batch_of(step, rank)) * factor).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
    return held(trainer)


def with_accumulation(rank):
    trainer = make()
    for step in range(6):
        trainer.optimizer.zero_grad()
        for part in batch_of(step, rank).chunk(2):
            (loss_of(trainer, part) / 2).backward()
        trainer.optimizer.step()
    return held(trainer)


def with_errors(rank):
    """Exceptions that the user catches, in forward and in a closure, between two steps."""
    trainer = make()
    for step in range(6):
        for fails in (lambda: trainer(torch.zeros(4, 9)), lambda: trainer.optimizer.step({}.pop)):
            try:
                fails()
            except (RuntimeError, TypeError):
                trainer.optimizer.zero_grad()
        train(trainer, [step], rank)
    return held(trainer)


def two_at_once(rank):
    first, second = make(), make(interval=3)
    for step in range(6):
        train(first, [step], rank)
        train(second, [step], rank)
    return held(first)


def resumed_in_another_round(rank):
    trainer = make()
    train(trainer, range(3), rank)
    saved = pickle.loads(pickle.dumps(trainer.state_dict()))
    train(trainer, range(20, 25), rank)
    trainer.load_state_dict(saved)
    train(trainer, range(3, 6), rank)
    return held(trainer)


def another_optimizer_is_told_in_the_next_forward(rank):
    trainer = make()
    other = torch.optim.SGD(trainer.subnet.parameters(), lr=0.1)
    loss_of(trainer, batch_of(0, rank)).backward()
    other.step()
    with pytest.warns(UserWarning, match="that a trainer was given were written to between two"):
        train(trainer, [0], rank)
    train(trainer, [1], rank)
    with warnings.catch_warnings(action="error"):
        for write in (trainer.flush, lambda: trainer.load_state_dict(trainer.state_dict())):
            loss_of(trainer, batch_of(2, rank))
            write()
            loss_of(trainer, batch_of(2, rank))


# Each trains steps 0 to 5, as ``plain`` does.
SAME = [
    with_closures,
    with_scaled_gradients,
    with_accumulation,
    with_errors,
    two_at_once,
    resumed_in_another_round,
]


def variations_of_the_loop_train_the_same(rank):
    expected = plain(rank)
    assert_equal_on_all_ranks({key: value.tolist() for key, value in expected.items()})
    for loop in SAME:
        # Accumulation sums the halves of a batch in another order.
        allowed = 1e-14 if loop is with_accumulation else 0
        assert gap(loop(rank), expected) <= allowed, loop.__name__


def frozen_parameters_are_cut_and_unchanged(rank):
    model = mlp(7, 13).double()
    model[2].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trainer = make(adamw, 1, module=model)
    train(trainer, range(4), rank)
    after = held(trainer)
    assert {k for k in before if torch.equal(before[k], after[k])} == {"2.weight", "4.bias"}


class Tied(nn.Module):
    """Embedding and unembedding share their weights, which are not cut."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Linear(5, 4, bias=False)
        self.net = mlp(7, 13)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        letters = self.letters(x)
        return self.net(letters @ self.letters.weight) * self.scale


def ranks_count_their_own_steps_and_tied_parameters_stay_tied(rank):
    """A tied parameter, and a 0-d one."""
    trainer = SubnetTrainer(Tied().double(), adamw, Partition({"net": SequentialChain()}), 2)
    steps = 5 if rank == 0 else 2
    train(trainer, range(steps), rank)
    trainer.flush()
    assert {float(s["step"]) for s in trainer.optimizer.state.values()} == {steps}
    assert trainer.round_index == 3
    assert_equal_on_all_ranks({key: value.tolist() for key, value in held(trainer).items()})


def modules_of_any_dtype(rank):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = mlp(7, 13).to(dtype)
        model.register_buffer("mask", torch.tensor([True, False]))
        model.register_buffer("places", torch.arange(3, dtype=torch.int16) + rank)
        # The default eps, 1e-8, is 0 in 16 bits.
        trainer = make(lambda p: torch.optim.AdamW(p, eps=1e-4), 2, module=model)
        begun = held(trainer)
        train(trainer, range(5), rank)
        trainer.flush()
        ended = held(trainer)
        assert_equal_on_all_ranks({key: value.tolist() for key, value in ended.items()})
        states = trainer.optimizer.state.values()
        assert {v.dtype for s in states for k, v in s.items() if k != "step"} == {dtype}
        assert ended.pop("mask").tolist() == [True, False]
        assert ended.pop("places").tolist() == [0, 1, 2]
        assert {value.dtype for value in ended.values()} == {dtype}
        assert not any(torch.equal(value, begun[key]) for key, value in ended.items())


def rounds_without_steps_are_skipped_and_ranks_without_batches_take_part(rank):
    trainer = make()
    before = held(trainer)
    for _ in range(3):
        trainer.flush()
    assert trainer.round_index == gap(before, held(trainer)) == 0
    lazy = make(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    train(lazy, range(4 if rank == 0 else 0), rank)
    lazy.flush()
    assert lazy.round_index == 2
    assert gap(before, held(lazy)) > 0


def in_a_part_of_the_group(rank):
    """Pairs of ranks train independently at the same time."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    trainer = make(process_group=pairs[rank // 2])
    train(trainer, range(5), rank)
    trainer.flush()
    return trainer.units, held(trainer)


def a_trainer_is_not_copied_but_its_subnet_is(rank):
    trainer = make()
    sentence = "must not be copied or pickled: save its state_dict.., or copy the model inside"
    for function in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=sentence):
            function(trainer)
    assert copy.deepcopy(trainer.subnet)(batch_of(0, rank)).shape == (8, 3)


def state_starts_at_the_optimizers_initial_value(rank):
    """All entries, on every rank."""
    trainer = make(lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=2.0), 1)
    for step in range(4):
        train(trainer, [step], rank)
        assert all(state["sum"].min() >= 2.0 for state in trainer.optimizer.state.values())


def learning_rate_schedules_continue_through_merges(rank):
    for state in (None, ResetState()):
        trainer = make(adamw, 1, optimizer_state=state)
        schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
        for step in range(3):
            train(trainer, [step], rank)
            schedule.step()
        assert trainer.optimizer.param_groups[0]["lr"] == 0.00125


def flush_and_loading_may_be_in_inference_mode(rank):
    found = []
    for mode in (True, False):
        trainer = make(adamw, 5)
        train(trainer, range(2), rank)
        with torch.inference_mode(mode):
            trainer.flush()  # the first merge, which creates the state of the whole model
        train(trainer, range(2, 9), rank)
        state = copy.deepcopy(trainer.state_dict())
        with torch.inference_mode(mode):
            trainer.load_state_dict(state)
        train(trainer, range(9, 15), rank)
        found.append(held(trainer))
    assert gap(*found) == 0


CASES = [
    variations_of_the_loop_train_the_same,
    another_optimizer_is_told_in_the_next_forward,
    frozen_parameters_are_cut_and_unchanged,
    ranks_count_their_own_steps_and_tied_parameters_stay_tied,
    modules_of_any_dtype,
    rounds_without_steps_are_skipped_and_ranks_without_batches_take_part,
    a_trainer_is_not_copied_but_its_subnet_is,
    state_starts_at_the_optimizers_initial_value,
    learning_rate_schedules_continue_through_merges,
    flush_and_loading_may_be_in_inference_mode,
]


def test_cases(ranks):
    ranks.run(2, call_each, [(case,) for case in CASES])


def test_parts_of_a_group_train_independently(ranks):
    found = ranks.run(4, in_a_part_of_the_group)
    for pair in (found[:2], found[2:]):
        for name, units in (("0", 7), ("2", 13)):
            assert torch.cat([kept[name] for kept, _ in pair]).sort().values.tolist() == list(
                range(units)
            )
        assert gap(pair[0][1], pair[1][1]) == 0
    assert gap(found[0][1], found[2][1]) > 0


def test_train_and_eval_are_those_of_a_module():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    plain = copy.deepcopy(model).double()
    trainer = make(module=model.double())
    inputs = batch_of(0, 0)
    assert trainer.eval() is trainer
    assert torch.equal(trainer(inputs), plain.eval()(inputs))
    with trainer.full_model() as full:
        assert torch.equal(full(inputs), plain(inputs))
    assert trainer.train() is trainer
    torch.manual_seed(3)
    found = trainer(inputs)
    torch.manual_seed(3)
    assert torch.equal(found, plain.train()(inputs))
    assert not trainer.train(False).subnet.training
