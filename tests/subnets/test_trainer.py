"""SubnetTrainer in a training loop: on a single rank, and over gloo on two and three ranks."""

import copy
import io
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
        with pytest.raises(RuntimeError, match="must not be entered inside itself"):
            trainer.full_model().__enter__()
        assert all(p.isfinite().all() for p in parameters)
    with pytest.raises(KeyError, match="inside"), trainer.full_model():
        raise KeyError("inside")
    assert all(p.isnan().all() and p.untyped_storage().nbytes() == 8 for p in parameters)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    with pytest.raises(DisagreementError, match=r"got 0.weight, released by another SubnetTrainer"):
        SubnetTrainer(model, sgd, partition, 2)


class TwoStep(torch.optim.SGD):
    """An optimizer whose step calls its parent's, whose hooks run too."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_inside_a_step_counts_once():
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, lambda p: TwoStep(p, lr=0.1), partition, 3)
    train(trainer, trainer.optimizer, range(3), 0, shape)
    assert trainer.round_index == 1


def test_a_step_with_a_closure_counts_once():
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, sgd, partition, 2)

    def closure():
        trainer.optimizer.zero_grad()
        loss = trainer(batch_of(0, 0, shape)[0]).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        trainer.optimizer.step(closure)
    assert trainer.round_index == 1
    trainer.flush()
    trainer.flush()
    assert trainer.round_index == 2


def test_after_close_nothing_is_merged():
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, sgd, partition, 1)
    trainer.close()
    train(trainer.subnet, trainer.optimizer, range(2), 0, shape)
    assert trainer.round_index == 0


def test_a_checkpoint_goes_through_a_file_and_must_fit():
    def make(interval=2, seed=5):
        return SubnetTrainer(build("mlp")[0], adam, Partition(seed=seed), interval)

    trainer = make()
    train(trainer, trainer.optimizer, range(3), 0, (4, 5))
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)
    file.seek(0)
    other = make()
    other.load_state_dict(torch.load(file))
    for each in (trainer, other):
        train(each, each.optimizer, range(3, 6), 0, (4, 5))
    assert same(held(trainer), held(other))
    with pytest.raises(DisagreementError, match="must have the same interval, 3, got 2"):
        make(3).load_state_dict(trainer.state_dict())
    with pytest.raises(DisagreementError, match="must be that of rank 0 of 1, got one of None"):
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
    (
        {"placement": Central},
        r"placement must be an object such as Sharded\(\) or Central",
    ),
    ({"placement": "central"}, "placement must be .*, got 'central'"),
    ({"scale": "averaged"}, r"scale must be an object such as Unscaled\(\) or Averaged\(\), got"),
    ({"optimizer_state": ResetState}, "optimizer_state must be .*, got the class ResetState"),
    ({"optimizer_fn": sgd(mlp().parameters())}, "optimizer_fn must be a function .*of SGD"),
    ({"module": [mlp()]}, "module must be a torch.nn.Module, got a list of 1: "),
    ({"module": nn.Sequential(nn.ReLU())}, "must have parameters that require gradients"),
    ({"module": nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))}, "0.weight, which is lazy"),
    ({"module": nn.Linear(2, 2)}, "an nn.Sequential only, got a module of Linear; declare what"),
    ({"placement": Central(1)}, "Central's rank must be one of 1, got 1"),
    ({"optimizer_fn": lambda p: p}, "must return a torch optimizer, got list"),
    ({"optimizer_fn": lambda p: sgd(p[1:])}, "lacks 1 and has 0 others"),
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


# Several ranks: every rank runs all cases in sequence; the tests check the results.


def scatter_and_merge(rank, name, place):
    """Return parameters changed by scatter and merge, with no steps and with learning rate 0."""
    model, partition, shape = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    if rank:  # rank 0's parameters are broadcast
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    last = dist.get_world_size() - 1
    placement = {"sharded": Sharded(), "first": Central(0), "last": Central(last)}[place]
    trainer = SubnetTrainer(model, frozen, partition, 2, placement=placement)
    seen = [held(trainer)]
    train(trainer, trainer.optimizer, range(5), rank, shape)
    trainer.flush()
    seen.append(held(trainer))
    return [key for each in seen for key in before if not torch.equal(before[key], each[key])]


def several_dtypes(rank):
    torch.manual_seed(0)
    model = nn.Sequential(mlp().bfloat16(), nn.Softmax(-1), nn.Linear(3, 2))
    before = copy.deepcopy(model.state_dict())
    trainer = SubnetTrainer(model, frozen, Partition({"0": SequentialChain()}), 1)
    for _ in range(2):
        trainer.subnet[0](torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
        trainer.optimizer.step()
    return same(held(trainer), before), trainer.round_index


def averaged(rank):
    """Return the given and the initial full model, and outputs of the full one and the subnets."""
    model, partition, shape = build("one width")
    given = copy.deepcopy(model.state_dict())
    trainer = SubnetTrainer(model, sgd, partition, 3, scale=Averaged())
    begun = held(trainer)
    train(trainer, trainer.optimizer, range(6), rank, shape)
    inputs, _ = batch_of(0, 0, shape)
    with torch.no_grad():
        mean = trainer(inputs)
        if dist.get_world_size() > 1:
            dist.all_reduce(mean)
        with trainer.full_model() as module:
            return given, begun, module(inputs), mean / dist.get_world_size()


def full_model_between_steps(rank):
    results = []
    for look in (False, True):
        model, partition, shape = build("norms")
        trainer = SubnetTrainer(model, adam, partition, 3)
        for step in range(7):
            train(trainer, trainer.optimizer, [step], rank, shape)
            if look and step in (1, 4):
                seen = held(trainer)
        results.append(held(trainer))
    return same(*results), same(seen, results[0]), trainer.round_index


def resuming(rank):
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
    return same(*results)


def reset_or_carried(rank):
    found = []
    for policy in (ResetState(), CarryState()):
        model, partition, shape = build("mlp")
        trainer = SubnetTrainer(model, adam, partition, 2, optimizer_state=policy)
        train(trainer, trainer.optimizer, range(2), rank, shape)
        found.append(len(trainer.optimizer.state))
    return found


def measured_together(rank):
    model, partition, shape = build("norms")
    trainer = SubnetTrainer(model, sgd, partition, 2)
    train(trainer, trainer.optimizer, range(3), rank, shape)
    with trainer.full_model() as module:
        recalibrate(module, [batch_of(step, rank, shape)[0] for step in range(rank + 1)])
        linear, norm, _ = module[0]
        found = [linear.weight, linear.bias, norm.running_mean, norm.running_var]
        return [tensor.detach().clone() for tensor in found]


def error_of(function):
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def unequal_steps(rank):
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, sgd, partition, 2)
    train(trainer, trainer.optimizer, range(7 if rank == 0 else 3), rank, shape)
    trainer.flush()
    return trainer.round_index, held(trainer)


def other_calls(rank):
    trainer = SubnetTrainer(mlp().double(), sgd, Partition(), 2)
    train(trainer, trainer.optimizer, range(1), rank, (4, 5))

    def step():
        train(trainer, trainer.optimizer, range(1), rank, (4, 5))

    error_text = error_of((lambda: held(trainer)) if rank else step)
    step()  # rank 0 has tried to merge, and tries again
    trainer.flush()
    return error_text, trainer.round_index


def state_of_some(rank):
    trainer = SubnetTrainer(mlp().double(), sgd, Partition(), 1)
    trainer.subnet[0].bias.requires_grad_(rank == 0)
    return error_of(lambda: train(trainer, trainer.optimizer, range(1), rank, (4, 5)))


def all_cases(rank):
    cases = [full_model_between_steps, resuming, reset_or_carried]
    cases += [measured_together, several_dtypes, averaged]
    if dist.get_world_size() > 1:
        cases += [unequal_steps, other_calls, state_of_some]
    placed = {each: scatter_and_merge(rank, *each) for each in PLACED}
    return placed | {case.__name__: case(rank) for case in cases}


@pytest.fixture(scope="module")
def outcome(ranks):
    """Return by number of ranks what each rank has found."""
    return {size: ranks.run(size, all_cases) for size in (1, 2, 3)}


def test_scatter_and_merge_alone_change_nothing(outcome, subtests):
    for ranks, (name, place) in product(outcome.values(), PLACED):
        with subtests.test(f"{len(ranks)} ranks, {name} {place}"):
            assert [rank[name, place] for rank in ranks] == [[]] * len(ranks)


def test_every_dtype_is_sent_in_its_own_message(outcome, subtests):
    for ranks in outcome.values():
        with subtests.test(f"{len(ranks)} ranks"):
            assert [rank["several_dtypes"] for rank in ranks] == [(True, 2)] * len(ranks)


def test_averaged_outputs_are_the_mean_of_the_subnets(outcome, subtests):
    for ranks in outcome.values():
        with subtests.test(f"{len(ranks)} ranks"):
            for given, begun, of_whole, mean_of_subnets in (rank["averaged"] for rank in ranks):
                torch.testing.assert_close(begun, given, rtol=1e-15, atol=0)
                torch.testing.assert_close(of_whole, mean_of_subnets, rtol=1e-12, atol=1e-14)


def test_entering_full_model_does_not_change_training(outcome, subtests):
    for ranks in outcome.values():
        with subtests.test(f"{len(ranks)} ranks"):
            assert [rank["full_model_between_steps"] for rank in ranks] == [(True, False, 2)] * len(
                ranks
            )


def test_a_run_resumes_bit_for_bit(outcome, subtests):
    for ranks in outcome.values():
        with subtests.test(f"{len(ranks)} ranks"):
            assert [rank["resuming"] for rank in ranks] == [True] * len(ranks)


def test_optimizer_state_is_carried_or_reset(outcome, subtests):
    for ranks in outcome.values():
        with subtests.test(f"{len(ranks)} ranks"):
            assert [rank["reset_or_carried"] for rank in ranks] == [[0, 6]] * len(ranks)


def test_statistics_are_measured_by_all_ranks_together(outcome, subtests):
    for ranks in outcome.values():
        with subtests.test(f"{len(ranks)} ranks"):
            values = torch.cat(
                [
                    batch_of(step, rank, (4, 5))[0]
                    for rank in range(len(ranks))
                    for step in range(rank + 1)
                ]
            )
            for rank in ranks:
                weight, bias, mean, variance = rank["measured_together"]
                hidden = values @ weight.T + bias
                torch.testing.assert_close(mean, hidden.mean(0), rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(variance, hidden.var(0), rtol=1e-12, atol=1e-12)


def test_a_rank_without_batches_waits_in_flush_and_takes_part_in_merges(outcome, subtests):
    for ranks in list(outcome.values())[1:]:
        with subtests.test(f"{len(ranks)} ranks"):
            rounds, models = zip(*(rank["unequal_steps"] for rank in ranks), strict=True)
            assert set(rounds) == {4}
            assert all(same(model, models[0]) for model in models)


def test_different_calls_are_an_error_on_all_ranks(outcome, subtests):
    for ranks in list(outcome.values())[1:]:
        with subtests.test(f"{len(ranks)} ranks"):
            for rank in ranks:
                error_text, rounds = rank["other_calls"]
                assert error_text.startswith(
                    "DisagreementError: all ranks must make the same calls, got optimizer.step() "
                    "in round 0 after 2 steps on rank 0 and full_model() in round 0 after 1 steps "
                    "on rank 1; call"
                )
                assert rounds == 1


def test_optimizer_state_missing_on_some_ranks_is_an_error(outcome, subtests):
    for ranks in list(outcome.values())[1:]:
        with subtests.test(f"{len(ranks)} ranks"):
            for rank in ranks:
                assert (
                    "optimizer state for the same parameters, got different ones on ranks 0 and 1"
                    in rank["state_of_some"]
                )
