"""SubnetTrainer in a training loop: on a single rank, and over gloo on two and three ranks."""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.comm import DisagreementError
from pyparallel.subnets import (
    Averaged,
    CarryState,
    Central,
    Partition,
    ResetState,
    Scaled,
    SequentialChain,
    Sharded,
    recalibrate,
)
from tests.cases import slow
from tests.subnets.helpers.models import (
    RESIDUAL_RULES,
    TRANSFORMER_RULES,
    convolutions,
    mlp,
    mlp_with_norms,
    one_width,
    residual,
    transformer,
)
from tests.subnets.helpers.training import batch_of, held, train
from tests.workers import assert_equal_on_all_ranks, call_each

MODELS = {
    "mlp": (lambda: mlp(7, 13), Partition(seed=5), (4, 5)),
    "one width": (one_width, Partition(seed=2), (4, 5)),
    "norms": (mlp_with_norms, Partition(seed=1), (4, 5)),
    "convolutions": (convolutions, Partition(), (4, 2, 6, 6)),
    "residual": (residual, Partition(RESIDUAL_RULES), (4, 2, 6, 6)),
    "transformer": (transformer, Partition(TRANSFORMER_RULES, seed=3), (4, 7, 5)),
}
PLACED = [  # the storing rank is the first or the last
    *((name, "sharded") for name in MODELS),
    *(("mlp", place) for place in ("first", "last")),
    *((name, "last") for name in ("norms", "transformer")),
]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def frozen(parameters):
    return torch.optim.Adam(parameters, lr=0.0)


def build(name):
    torch.manual_seed(0)
    make, partition, shape = MODELS[name]
    return make().double(), partition, shape


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# A single rank.


def test_a_single_rank_trains_the_full_model_bit_for_bit(subtests):
    kinds = [(Scaled(), sgd), (Averaged(), adam)]
    for (scale, make_optimizer), name in product(kinds, MODELS):
        with subtests.test(f"{name} {make_optimizer.__name__} {scale}"):
            plain, partition, shape = build(name)
            model = copy.deepcopy(plain)
            optimizer = make_optimizer(plain.parameters())
            trainer = SubnetTrainer(model, make_optimizer, partition, 2, scale=scale)
            train(plain, optimizer, range(5), 0, shape)
            train(trainer, trainer.optimizer, range(5), 0, shape)
            trainer.flush()
            assert trainer.round_index == 3
            assert same(held(trainer), plain.state_dict())
            assert trainer.bytes_sent == 0


def test_the_module_has_memory_only_inside_full_model():
    model, partition, _ = build("mlp")
    parameters = list(model.parameters())
    trainer = SubnetTrainer(model, sgd, partition, 2)
    with trainer.full_model() as module:
        assert module is model
        assert all(p.isfinite().all() for p in parameters)
    with pytest.raises(KeyError, match="inside"), trainer.full_model():
        raise KeyError("inside")
    assert all(p.isnan().all() and p.untyped_storage().nbytes() == 8 for p in parameters)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    with pytest.raises(DisagreementError, match=r"got 0.weight, released by another SubnetTrainer"):
        SubnetTrainer(model, sgd, partition, 2)


def test_after_close_nothing_is_merged():
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, sgd, partition, 1)
    trainer.close()
    train(trainer.subnet, trainer.optimizer, range(2), 0, shape)
    assert trainer.round_index == 0


def test_a_checkpoint_must_fit():
    def make(interval=2):
        return SubnetTrainer(build("mlp")[0], adam, Partition(), interval)

    state = make().state_dict()
    with pytest.raises(DisagreementError, match="must have the same interval, 3, got 2"):
        make(3).load_state_dict(state)
    with pytest.raises(DisagreementError, match="the state's format must be 3, that of"):
        make().load_state_dict({})


BAD = [
    ({"interval": 0}, "interval must be an integer number of steps, at least 1, got 0"),
    ({"interval": 2.5}, "interval must be an integer number"),
    ({"partition": None}, r"partition must be an object such as Partition\(\), got None"),
    ({"partition": Partition}, r"the class Partition; create an object, Partition\(...\)"),
    (
        {"partition": {"": SequentialChain()}},
        r"got a dict with keys ''; wrap it, Partition\(rules\)",
    ),
    ({"partition": "0"}, "partition must be .*, got '0'"),
    ({"placement": Central}, r"placement must be an object such as Sharded\(\) or Central"),
    ({"placement": "central"}, "placement must be .*, got 'central'"),
    ({"scale": "averaged"}, r"scale must be an object such as Unscaled\(\) or Averaged\(\), got"),
    ({"optimizer_state": ResetState}, "optimizer_state must be .*, got the class ResetState"),
    ({"optimizer_fn": sgd(mlp().parameters())}, "optimizer_fn must be a function .*of SGD"),
    ({"module": [mlp()]}, "module must be a torch.nn.Module, got a list of 1: "),
    ({"module": nn.Sequential(nn.ReLU())}, "must have parameters that require gradients"),
    ({"module": nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))}, "0.weight, which is lazy"),
    ({"placement": Central(1)}, "Central's rank must be one of 1, got 1"),
    ({"optimizer_fn": lambda p: p}, "must return a torch optimizer, got list"),
    ({"optimizer_fn": lambda p: sgd(p[1:])}, "lacks 1 and has 0 others"),
    ({"optimizer_fn": lambda p: sgd([*p, nn.Parameter(p[0] + 1)])}, "lacks 0 and has 1 others"),
    ({"optimizer_fn": lambda p: {}["lr"]}, "optimizer_fn: KeyError: 'lr'"),
]


def test_bad_input_is_an_error(subtests):
    for change, error_text in BAD:
        with subtests.test(error_text):
            arguments = {
                "module": mlp(),
                "optimizer_fn": sgd,
                "partition": Partition(),
                "interval": 2,
                **change,
            }
            with pytest.raises(DisagreementError, match=f"^rank 0: .*{error_text}"):
                SubnetTrainer(**arguments)


def test_a_compiled_module_is_its_module():
    compiled = torch.compile(mlp(), backend="eager")
    trainer = SubnetTrainer(compiled, sgd, Partition(), interval=2)
    with trainer.full_model() as module:
        assert type(module) is nn.Sequential


# On several ranks, and on one.


def scatter_and_merge_alone_change_nothing(rank):
    """With no steps, and with learning rate 0."""
    last = dist.get_world_size() - 1
    placements = {"sharded": Sharded(), "first": Central(0), "last": Central(last)}
    for name, place in PLACED:
        model, partition, shape = build(name)
        before = {key: value.detach().clone() for key, value in model.named_parameters()}
        if rank:  # rank 0's parameters are broadcast
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        trainer = SubnetTrainer(model, frozen, partition, 2, placement=placements[place])
        seen = [held(trainer)]
        train(trainer, trainer.optimizer, range(5), rank, shape)
        trainer.flush()
        for after in (*seen, held(trainer)):
            assert all(torch.equal(before[key], after[key]) for key in before), (name, place)


def every_dtype_is_sent_in_its_own_message(rank):
    torch.manual_seed(0)
    model = nn.Sequential(mlp().bfloat16(), nn.Softmax(-1), nn.Linear(3, 2))
    before = copy.deepcopy(model.state_dict())
    trainer = SubnetTrainer(model, frozen, Partition({"0": SequentialChain()}), 1)
    for _ in range(2):
        trainer.subnet[0](torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
        trainer.optimizer.step()
    assert same(held(trainer), before)
    assert trainer.round_index == 2


def averaged_outputs_are_the_mean_of_the_subnets(rank):
    model, partition, shape = build("one width")
    given = copy.deepcopy(model.state_dict())
    trainer = SubnetTrainer(model, sgd, partition, 3, scale=Averaged())
    torch.testing.assert_close(held(trainer), dict(given), rtol=1e-15, atol=0)
    train(trainer, trainer.optimizer, range(6), rank, shape)
    inputs, _ = batch_of(0, 0, shape)
    with torch.no_grad():
        mean = trainer(inputs)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        with trainer.full_model() as module:
            torch.testing.assert_close(module(inputs), mean, rtol=1e-12, atol=1e-14)


def entering_full_model_does_not_change_training(rank):
    results = []
    for look in (False, True):
        model, partition, shape = build("norms")
        trainer = SubnetTrainer(model, adam, partition, 3)
        for step in range(7):
            train(trainer, trainer.optimizer, [step], rank, shape)
            if look and step in (1, 4):
                seen = held(trainer)
                assert same(trainer.full_state_dict(), {} if rank else seen)
        results.append(held(trainer))
    assert same(*results)
    assert not same(seen, results[0])
    assert trainer.round_index == 2


def resume(rank):
    results = []
    for resumes in (False, True):
        model, partition, shape = build("norms")
        trainer = SubnetTrainer(model, adam, partition, 2)
        train(trainer, trainer.optimizer, range(3), rank, shape)
        if resumes:
            state = copy.deepcopy(trainer.state_dict())
            trainer = SubnetTrainer(build("norms")[0], adam, partition, 2)
            trainer.load_state_dict(state)
        train(trainer, trainer.optimizer, range(3, 6), rank, shape)
        results.append(held(trainer))
    assert same(*results)


def optimizer_state_is_carried_or_reset(rank):
    for policy, num_states in ((ResetState(), 0), (CarryState(), 6)):
        model, partition, shape = build("mlp")
        trainer = SubnetTrainer(model, adam, partition, 2, optimizer_state=policy)
        train(trainer, trainer.optimizer, range(2), rank, shape)
        assert len(trainer.optimizer.state) == num_states


def statistics_are_measured_by_all_ranks_together(rank):
    model, partition, shape = build("norms")
    trainer = SubnetTrainer(model, sgd, partition, 2)
    train(trainer, trainer.optimizer, range(3), rank, shape)
    batches = [
        [batch_of(step, each, shape)[0] for step in range(each + 1)]
        for each in range(dist.get_world_size())
    ]
    with trainer.full_model() as module, torch.no_grad():
        recalibrate(module, batches[rank])
        linear, norm, _ = module[0]
        hidden = linear(torch.cat([batch for each in batches for batch in each]))
        torch.testing.assert_close(norm.running_mean, hidden.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm.running_var, hidden.var(0), rtol=1e-12, atol=1e-12)


def a_rank_without_batches_waits_in_flush_and_takes_part_in_merges(rank):
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, sgd, partition, 2)
    train(trainer, trainer.optimizer, range(7 if rank == 0 else 3), rank, shape)
    trainer.flush()
    assert trainer.round_index == 4
    assert_equal_on_all_ranks({key: value.tolist() for key, value in held(trainer).items()})


def different_calls_are_an_error_on_all_ranks(rank):
    trainer = SubnetTrainer(mlp().double(), sgd, Partition(), 2)

    def step():
        train(trainer, trainer.optimizer, range(1), rank, (4, 5))

    step()
    sentence = (
        r"^all ranks must make the same calls, got optimizer.step\(\) in round 0 after 2 steps on "
        r"rank 0 and full_model\(\) in round 0 after 1 steps on rank 1; call"
    )
    with pytest.raises(DisagreementError, match=sentence):
        held(trainer) if rank else step()
    step()  # rank 0 has tried to merge, and tries again
    trainer.flush()
    assert trainer.round_index == 1


def optimizer_state_missing_on_some_ranks_is_an_error(rank):
    trainer = SubnetTrainer(mlp().double(), sgd, Partition(), 1)
    trainer.subnet[0].bias.requires_grad_(rank == 0)
    sentence = "state for the same parameters, got different ones on ranks 0 and 1"
    with pytest.raises(DisagreementError, match=sentence):
        train(trainer, trainer.optimizer, range(1), rank, (4, 5))


CASES = [
    scatter_and_merge_alone_change_nothing,
    every_dtype_is_sent_in_its_own_message,
    averaged_outputs_are_the_mean_of_the_subnets,
    entering_full_model_does_not_change_training,
    optimizer_state_is_carried_or_reset,
    statistics_are_measured_by_all_ranks_together,
]
WITH_OTHERS = [
    a_rank_without_batches_waits_in_flush_and_takes_part_in_merges,
    different_calls_are_an_error_on_all_ranks,
    optimizer_state_missing_on_some_ranks_is_an_error,
]
each_size = pytest.mark.parametrize("num_ranks", [1, slow(2), 3])


@each_size
def test_cases(ranks, num_ranks):
    cases = CASES if num_ranks == 1 else [*CASES, *WITH_OTHERS]
    ranks.run(num_ranks, call_each, [(case,) for case in cases])


@each_size
def test_a_run_resumes_bit_for_bit(ranks, num_ranks):
    ranks.run(num_ranks, resume)
