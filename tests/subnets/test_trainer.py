"""SubnetTrainer in a training loop: on a single rank, and over gloo on two and three ranks."""

import copy
import functools
import io
import os
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
    Unscaled,
    recalibrate,
)
from tests.subnets.helpers.masked import MLP_LAYOUT, Momentum, train_together
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
from tests.subnets.helpers.sizes import run_sizes
from tests.workers import observe_ranks

MODELS = {
    "mlp": (lambda: mlp(7, 13), Partition(seed=5), (4, 5)),
    "one width": (one_width, Partition(seed=2), (4, 5)),
    "norms": (mlp_with_norms, Partition(seed=1), (4, 5)),
    "convolutions": (convolutions, Partition(), (4, 2, 6, 6)),
    "residual": (residual, Partition(RESIDUAL_RULES), (4, 2, 6, 6)),
    "transformer": (transformer, Partition(TRANSFORMER_RULES, seed=3), (4, 7, 5)),
}
PLACEMENTS = {"sharded": Sharded(), "central": Central(0)}
PLACED = [  # the other models and placements: test_invariants.py
    *((name, "sharded") for name in ("one width", "norms", "residual", "transformer")),
    ("norms", "central"),
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


def batch_of(step, rank, shape):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randn((*shape[:-1], 3), generator=generator, dtype=torch.float64)


def train(model, optimizer, steps, rank, shape):
    for step in steps:
        inputs, targets = batch_of(step, rank, shape)
        optimizer.zero_grad()
        output = model(inputs)
        if output.shape == targets.shape:
            loss = nn.functional.mse_loss(output, targets)
        else:
            loss = output.square().mean()
        loss.backward()
        optimizer.step()


def held(trainer):
    with trainer.full_model() as module:
        return {key: value.clone() for key, value in module.state_dict().items()}


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


def scatter_and_merge(rank, name, placement):
    model, partition, shape = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if rank:  # rank 0's parameters are broadcast
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    trainer = SubnetTrainer(model, frozen, partition, 2, placement=PLACEMENTS[placement])
    train(trainer, trainer.optimizer, range(5), rank, shape)
    trainer.flush()
    after = held(trainer)
    weights = [key for key in before if "running" not in key and "num_" not in key]
    return [key for key in weights if not torch.equal(before[key], after[key])]


def several_dtypes(rank):
    torch.manual_seed(0)
    model = nn.Sequential(mlp().bfloat16(), nn.Softmax(-1), nn.Linear(3, 2))
    before = copy.deepcopy(model.state_dict())
    trainer = SubnetTrainer(model, frozen, Partition({"0": SequentialChain()}), 1)
    for _ in range(2):
        trainer.subnet[0](torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
        trainer.optimizer.step()
    return same(held(trainer), before), trainer.round_index


def momentum_of_all(rank):
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, sgd, partition, 3)
    train(trainer, trainer.optimizer, range(8), rank, shape)
    trainer.flush()
    return held(trainer)


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


def bytes_of_rounds(rank):
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, lambda p: torch.optim.SGD(p, lr=0.1), partition, 1)
    sent = [trainer.bytes_sent]
    train(trainer, trainer.optimizer, range(1), rank, shape)
    sent.append(trainer.bytes_sent)
    held(trainer)
    sent.append(trainer.bytes_sent)
    return sent, trainer.payload_bytes


def measured_together(rank):
    model, partition, shape = build("norms")
    trainer = SubnetTrainer(model, sgd, partition, 2)
    train(trainer, trainer.optimizer, range(3), rank, shape)
    with trainer.full_model() as module:
        recalibrate(module, [batch_of(step, rank, shape)[0] for step in range(rank + 1)])
        linear, norm, _ = module[0]
        found = [linear.weight, linear.bias, norm.running_mean, norm.running_var]
        return [tensor.detach().clone() for tensor in found]


def units_of_ranks(rank):
    model, partition, shape = build("mlp")
    trainer = SubnetTrainer(model, sgd, partition, 1)
    before = trainer.units
    train(trainer, trainer.optimizer, range(1), rank, shape)
    return before, trainer.units


def error_of(function):
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreements(rank):
    def fails(**change):
        arguments = {
            "module": mlp(),
            "optimizer_fn": sgd,
            "partition": Partition(),
            "interval": 2,
            **change,
        }
        return error_of(lambda: SubnetTrainer(**arguments))

    return [
        fails(partition=Partition(seed=rank)),
        fails(interval=2 + rank),
        fails(placement=Sharded() if rank else Central()),
        fails(scale=Scaled() if rank else Unscaled()),
        fails(optimizer_fn=sgd if rank else adam),
        fails(module=mlp(8 if rank else 9)),
        fails(module=mlp(1)),
        fails(
            partition=Partition({"": SequentialChain(), "x": SequentialChain()} if rank else None)
        ),
    ]


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
    cases = {case: scatter_and_merge(rank, *case) for case in PLACED}
    alone = [momentum_of_all, full_model_between_steps, resuming, reset_or_carried, bytes_of_rounds]
    alone += [measured_together, units_of_ranks, several_dtypes, averaged]
    if dist.get_world_size() > 1:
        alone += [disagreements, unequal_steps, other_calls, state_of_some]
    return cases | {case.__name__: case(rank) for case in alone}


@functools.cache
def outcome():
    """Return by number of ranks what each rank has found."""
    return run_sizes((1, 2, 3), all_cases)


def test_scatter_and_merge_alone_change_nothing(subtests):
    for ranks, (name, place) in product(outcome().values(), PLACED):
        with subtests.test(f"{len(ranks)} ranks, {name} {place}"):
            assert [rank[name, place] for rank in ranks] == [[]] * len(ranks)


def test_every_dtype_is_sent_in_its_own_message(subtests):
    for ranks in outcome().values():
        with subtests.test(f"{len(ranks)} ranks"):
            assert [rank["several_dtypes"] for rank in ranks] == [(True, 2)] * len(ranks)


def test_training_equals_masked_training_of_the_full_model(subtests):
    for ranks in outcome().values():
        with subtests.test(f"{len(ranks)} ranks"):
            model, partition, shape = build("mlp")
            batches = [
                [batch_of(step, rank, shape) for rank in range(len(ranks))] for step in range(8)
            ]
            cut_dims = partition.cut_dims(model)
            draws = [partition.draw(cut_dims, round_index, len(ranks)) for round_index in range(3)]
            train_together(model, MLP_LAYOUT, draws, batches, 3, Momentum(0.1, 0.9))
            for rank in ranks:
                assert same(rank["momentum_of_all"], ranks[0]["momentum_of_all"])
                for key, expected in model.state_dict().items():
                    found = rank["momentum_of_all"][key]
                    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_averaged_outputs_are_the_mean_of_the_subnets(subtests):
    for ranks in outcome().values():
        with subtests.test(f"{len(ranks)} ranks"):
            for given, begun, of_whole, mean_of_subnets in (rank["averaged"] for rank in ranks):
                torch.testing.assert_close(begun, given, rtol=1e-15, atol=0)
                torch.testing.assert_close(of_whole, mean_of_subnets, rtol=1e-12, atol=1e-14)


def test_entering_full_model_does_not_change_training(subtests):
    for ranks in outcome().values():
        with subtests.test(f"{len(ranks)} ranks"):
            assert [rank["full_model_between_steps"] for rank in ranks] == [(True, False, 2)] * len(
                ranks
            )


def test_a_run_resumes_bit_for_bit(subtests):
    for ranks in outcome().values():
        with subtests.test(f"{len(ranks)} ranks"):
            assert [rank["resuming"] for rank in ranks] == [True] * len(ranks)


def test_optimizer_state_is_carried_or_reset(subtests):
    for ranks in outcome().values():
        with subtests.test(f"{len(ranks)} ranks"):
            assert [rank["reset_or_carried"] for rank in ranks] == [[0, 6]] * len(ranks)


def test_bytes_sent_match_the_formula(subtests):
    for ranks in outcome().values():
        with subtests.test(f"{len(ranks)} ranks"):
            num = len(ranks)
            parts = [
                [(unit + 1) * h // num - unit * h // num for unit in range(num)] for h in (7, 13)
            ]
            inner = sum(a * b for a, b in zip(*parts, strict=True))
            payload = 8 * (5 * 7 + 7 + inner + 13 + 13 * 3)
            shared = 2 * (2 * 3 * 8) * (num - 1) // num  # the output's bias, in two halves
            assert [rank["bytes_of_rounds"][1] for rank in ranks] == [payload] * num
            first, after, later = (sum(r["bytes_of_rounds"][0][i] for r in ranks) for i in range(3))
            assert later == after
            assert first <= payload
            # A round is a merge and a scatter; what stays on its rank differs between draws.
            assert after - first <= 2 * payload + num * shared
            assert after - first > (payload if num > 1 else -1)


def test_statistics_are_measured_by_all_ranks_together(subtests):
    for ranks in outcome().values():
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


def test_every_unit_is_assigned_to_one_rank_in_every_round(subtests):
    for ranks in outcome().values():
        with subtests.test(f"{len(ranks)} ranks"):
            for at in (0, 1):
                for name, units in (("0", 7), ("2", 13)):
                    gathered = torch.cat([rank["units_of_ranks"][at][name] for rank in ranks])
                    assert gathered.sort().values.tolist() == list(range(units))


ERRORS = [
    "all ranks must have the same partition, got Partition(rules=None, seed=0) on rank 0 and "
    "Partition(rules=None, seed=1) on rank 1",
    "all ranks must have the same interval, got 2 on rank 0 and 3 on rank 1",
    "all ranks must have the same placement, got Central(rank=0) on rank 0 and Sharded() on rank 1",
    "all ranks must have the same scale, got Unscaled() on rank 0 and Scaled() on rank 1",
    "all ranks must have the same optimizer, got Adam on rank 0 and SGD on rank 1",
    "all ranks must have the same tensor 0, got 0.weight float32 [9, 5] cpu on rank 0 and "
    "0.weight float32 [8, 5] cpu on rank 1",
    "0 with 1 units; leave it out of the rules or use fewer ranks",
    ": rules must name submodules, got 'x', which matches none",
]


def test_different_arguments_are_refused_on_all_ranks(subtests):
    for ranks in list(outcome().values())[1:]:
        with subtests.test(f"{len(ranks)} ranks"):
            for rank in ranks:
                for found, error_text in zip(rank["disagreements"], ERRORS, strict=True):
                    assert found.startswith("DisagreementError: ")
                    assert error_text in found


def test_a_rank_without_batches_waits_in_flush_and_takes_part_in_merges(subtests):
    for ranks in list(outcome().values())[1:]:
        with subtests.test(f"{len(ranks)} ranks"):
            rounds, models = zip(*(rank["unequal_steps"] for rank in ranks), strict=True)
            assert set(rounds) == {4}
            assert all(same(model, models[0]) for model in models)


def test_different_calls_are_an_error_on_all_ranks(subtests):
    for ranks in list(outcome().values())[1:]:
        with subtests.test(f"{len(ranks)} ranks"):
            for rank in ranks:
                error_text, rounds = rank["other_calls"]
                assert error_text.startswith(
                    "DisagreementError: all ranks must make the same calls, got optimizer.step() "
                    "in round 0 after 2 steps on rank 0 and full_model() in round 0 after 1 steps "
                    "on rank 1; call"
                )
                assert rounds == 1


def test_optimizer_state_missing_on_some_ranks_is_an_error(subtests):
    for ranks in list(outcome().values())[1:]:
        with subtests.test(f"{len(ranks)} ranks"):
            for rank in ranks:
                assert (
                    "optimizer state for the same parameters, got different ones on ranks 0 and 1"
                    in rank["state_of_some"]
                )


def dies(rank):
    trainer = SubnetTrainer(mlp().double(), sgd, Partition(), 2)
    train(trainer, trainer.optimizer, range(2), rank, (4, 5))
    if rank == 1:
        os._exit(3)
    train(trainer, trainer.optimizer, range(2), rank, (4, 5))


def test_a_dead_rank_is_an_error_not_a_hang():
    survivor, dead = observe_ranks(2, dies, group_timeout=5)
    assert dead.exit_code == 3
    assert survivor.error.startswith(
        "PeerError: rank 0, step 4: the all-gather failed: rank 1 died"
    )
