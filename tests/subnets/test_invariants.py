"""Invariants of independent subnetwork training for any model: single rank, and over gloo.

Those of its sketches are in ``tests/benchmarks/theory/test_quadratic.py``.
"""

import copy
import math
from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.comm import collectives
from pyparallel.subnets import Central, Partition, ResetState, Sharded
from tests.cases import slow
from tests.subnets.helpers.masked import (
    MLP_LAYOUT,
    AdamW,
    Momentum,
    blocks_of,
    mask_units,
    smooth_mlp,
    train_together,
)
from tests.subnets.helpers.models import RESIDUAL_RULES, TRANSFORMER_RULES, residual, transformer
from tests.subnets.helpers.training import batch_of, held, train

plain_sgd = partial(torch.optim.SGD, lr=0.1)


INTERVAL = 3  # of counted steps
ROUNDS = 20
PLACED = [((8, 8), Sharded()), ((13, 10), Central(0)), ((4, 5), Sharded())]
BYTES = 8  # of a float64


def smooth_convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.BatchNorm1d(5 * 9),
        nn.Linear(5 * 9, 10),
        nn.Tanh(),
        nn.Linear(10, 3),
    ).double()


MODELS = {
    "mlp": (lambda: smooth_mlp(7, 13), Partition(seed=2), (4, 5), MLP_LAYOUT),
    "convolutions": (
        smooth_convolutions,
        Partition(seed=1),
        (4, 2, 6, 6),
        {
            "0": ("0", 1, None),
            "1": ("0", 1, None),
            "4": ("4", 1, "0"),
            "7": ("4", 1, None),
            "8": ("8", 1, "4"),
            "10": (None, 1, "8"),
        },
    ),
    "residual": (
        lambda: residual().double(),
        Partition(RESIDUAL_RULES, seed=4),
        (4, 2, 6, 6),
        {
            f"{block}.{layer}": dims
            for block in (1, 2)
            for layer, dims in {
                "conv1": (f"{block}.conv1", 1, None),
                "bn1": (f"{block}.conv1", 1, None),
                "conv2": (None, 1, f"{block}.conv1"),
            }.items()
        },
    ),
    "transformer": (
        lambda: transformer().double(),
        Partition(TRANSFORMER_RULES, seed=3),
        (4, 7, 5),
        {
            "1.qkv": ("1.qkv", 3, None),
            "1.project": (None, 1, "1.qkv"),
            "1.mlp.0": ("1.mlp.0", 1, None),
            "1.mlp.2": (None, 1, "1.mlp.0"),
            **{f"2.{name}": ("2.q", 1, None) for name in "qkv"},
            "2.out": (None, 1, "2.q"),
        },
    ),
}
RULES = {"momentum": Momentum(0.1, 0.9), "adamw": AdamW(0.01, 0.1)}


def build(name):
    torch.manual_seed(0)
    make, partition, shape, layout = MODELS[name]
    return make(), partition, shape, layout


def count_steps(trainer, steps):
    """Add 1 to every trained entry in every step; the learning rate must be 1."""
    for _ in range(steps):
        trainer.optimizer.zero_grad()
        sum(-parameter.sum() for parameter in trainer.subnet.parameters()).backward()
        trainer.optimizer.step()


def counter(partition, interval, widths, placement=Sharded()):  # noqa: B008 - immutable
    model = smooth_mlp(*widths)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return SubnetTrainer(
        model, lambda p: torch.optim.SGD(p, lr=1.0), partition, interval, placement=placement
    )


def sizes_of(units, num):
    return [(part + 1) * units // num - part * units // num for part in range(num)]


# Without process groups.


@pytest.mark.slow
def test_inner_entries_are_trained_as_often_as_expected(subtests):
    for first, second, num in [(8, 12, 4), (7, 13, 3), (6, 6, 2)]:
        with subtests.test(f"{first} {second} {num}"):
            rounds = 1500
            partition = Partition(seed=6)
            cut_dims = partition.cut_dims(smooth_mlp(first, second))
            counts = torch.zeros(second, first)
            for round_index in range(rounds):
                draw = partition.draw(cut_dims, round_index, num)
                for columns, rows in zip(draw["0"], draw["2"], strict=True):
                    counts[rows[:, None], columns] += 1
            inner = sum(
                a * b for a, b in zip(sizes_of(first, num), sizes_of(second, num), strict=True)
            )
            chance = inner / (first * second)  # 1/n if n divides the units
            scores = (counts - rounds * chance) / math.sqrt(rounds * chance * (1 - chance))
            assert scores.abs().max() < 5
            assert 0.6 < scores.square().mean() < 1.5


def regularized():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6), nn.ReLU(),
        nn.Linear(6, 3),
    ).double()  # fmt: skip


# Over gloo: every rank runs all cases in sequence; the tests check the results.


def masked(rank):
    """Return the gaps of each subnet's output and gradients to those of the masked full model."""
    size = dist.get_world_size()
    gaps = {}
    for name in MODELS:
        whole, partition, shape, layout = build(name)
        trainer = SubnetTrainer(copy.deepcopy(whole), plain_sgd, partition, 1)
        for round_index in range(2):
            begun = held(trainer)
            whole.load_state_dict(begun)
            kept = trainer.units
            units = {cut_dim.name: cut_dim.units for cut_dim in partition.cut_dims(whole)}
            handles = mask_units(whole, layout, kept, units)
            inputs, _ = batch_of(round_index, rank, shape)
            outputs = trainer(inputs), whole(inputs)
            whole.zero_grad()
            trainer.optimizer.zero_grad()
            for output in outputs:
                output.square().sum().backward()
            for handle in handles:
                handle.remove()
            gaps[name, round_index, "output"] = _gap(*outputs)
            parts = dict(trainer.subnet.named_parameters())
            blocks = blocks_of(whole, layout, kept, units)
            for key, parameter in whole.named_parameters():
                inside, outside = parameter.grad[blocks[key]], parameter.grad[~blocks[key]]
                gaps[name, round_index, key] = _gap(parts[key].grad.flatten(), inside)
                gaps[name, round_index, f"{key} elsewhere"] = float(outside.abs().sum())
            trainer.optimizer.step()
    return gaps, size


def _gap(found, wanted):
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=0.1))


def steps_counted(rank):
    """Return by steps taken the rounds and counts before and after the last merge."""
    counted = {}
    for steps in range(1, 8):
        trainer = counter(Partition(seed=2), INTERVAL, (7, 13))
        count_steps(trainer, steps)
        rounds, rows = trainer.round_index, trainer.state_dict()["shards"]["rows"]["0.weight"]
        merged, seen = rows.clone(), held(trainer)
        for _ in range(2):
            trainer.flush()
        counted[steps] = rounds, merged, trainer.round_index, (seen, held(trainer))
    return counted


def many_rounds(rank):
    """Return the units of each round of a step, and the counts of all."""
    found = []
    for widths, placement in PLACED:
        trainer, had = counter(Partition(seed=1), 1, widths, placement), []
        for _ in range(ROUNDS):
            had.append(trainer.units)
            count_steps(trainer, 1)
        found.append((had, held(trainer)))
    return found


def evaluated(rank):
    """Return the full model's outputs for samples in batches of one, two and six."""
    model = regularized()
    trainer = SubnetTrainer(model, plain_sgd, Partition(), 2)
    train(trainer, trainer.optimizer, range(5), rank)
    samples = torch.cat([batch_of(step, 0)[0] for step in (7, 8, 9)])[:6]
    with trainer.full_model() as module, torch.no_grad():
        module.eval()
        return [torch.cat([module(batch) for batch in samples.split(n)]) for n in (1, 2, 6)]


def traffic(rank):
    """Return bytes sent and collectives of two rounds, for each placement and optimizer."""
    found = {}
    placements = {"sharded": Sharded(), "central": Central(dist.get_world_size() - 1)}
    optimizers = {
        "sgd": (plain_sgd, None),
        "momentum": (RULES["momentum"].make, None),
        "adamw": (RULES["adamw"].make, None),
        "reset": (RULES["adamw"].make, ResetState()),
    }
    for place, placement in placements.items():
        for kind, (make_optimizer, state) in optimizers.items():
            torch.manual_seed(0)
            trainer = SubnetTrainer(
                smooth_mlp(12, 12, bias=False),
                make_optimizer,
                Partition(seed=8),
                1,
                placement=placement,
                optimizer_state=state,
            )
            sent = [trainer.bytes_sent]
            with watched() as calls:
                for step in range(2):
                    train(trainer, trainer.optimizer, [step], rank)
                    sent.append(trainer.bytes_sent)
            held(trainer)
            assert trainer.bytes_sent == sent[-1]
            found[place, kind] = sent, calls, trainer.payload_bytes
    return found


@contextmanager
def watched():
    """Record the collectives called inside, with the bytes that each is given to send."""
    calls = []

    def watch(name, sent_at, module=dist):
        function = getattr(module, name)

        def call(*args, **kwargs):
            sent = args[sent_at]
            calls.append((name, sent.numel() * sent.element_size()))
            return function(*args, **kwargs)

        patch.setattr(module, name, call)

    with pytest.MonkeyPatch.context() as patch:
        watch("all_to_all_single", 1)
        watch("_gather", 1, collectives)  # of torch's names for it, the one that torch has
        for name in ("all_reduce", "broadcast", "all_gather_object"):
            watch(name, 0)
        yield calls


def carried(rank):
    """Return weights, and this rank's rows of the optimizer's state, after some rounds."""
    found = {}
    for name, rule in RULES.items():
        torch.manual_seed(0)
        trainer = SubnetTrainer(smooth_mlp(7, 13), rule.make, Partition(seed=5), 3)
        train(trainer, trainer.optimizer, range(11), rank)
        trainer.flush()
        found[name] = held(trainer), trainer.state_dict()["shards"]["states"]
    return found


def memory(rank):
    model = smooth_mlp(12, 12)
    trainer = SubnetTrainer(model, RULES["adamw"].make, Partition(), 1)
    train(trainer, trainer.optimizer, range(2), rank)
    inner = trainer.subnet[2].weight
    state = trainer.optimizer.state[inner]
    rows = trainer.state_dict()["shards"]["rows"]["2.weight"]
    return {
        "weights": inner.numel(),
        "state": [state[key].numel() for key in RULES["adamw"].keys],
        "storage": inner.untyped_storage().nbytes() // BYTES,
        "rows": rows.untyped_storage().nbytes() // BYTES,
        "module": max(p.untyped_storage().nbytes() for p in model.parameters()),
    }


def all_cases(rank):
    cases = [masked, steps_counted, many_rounds, evaluated, traffic, carried, memory]
    return {case.__name__: case(rank) for case in cases}


@pytest.fixture(scope="module", params=[1, slow(2), 3], ids=str)
def outcomes(ranks, request):
    """Return what each rank has found, of one, two and three ranks."""
    return ranks.run(request.param, all_cases)


def test_a_subnet_equals_the_full_model_with_the_other_units_masked(outcomes):
    for gaps, size in (rank["masked"] for rank in outcomes):
        assert size == len(outcomes)
        assert {name for name, *_ in gaps} == set(MODELS)
        for case, gap in gaps.items():
            assert gap < 1e-12, case
            assert gap == 0 or not case[2].endswith("elsewhere"), case


def test_every_local_step_is_in_the_merged_model(outcomes):
    """Bugs of published code: the last step of an interval, and of an epoch, was dropped."""
    partition = Partition(seed=2)
    model = smooth_mlp(7, 13)
    cut_dims = partition.cut_dims(model)
    units = {cut_dim.name: cut_dim.units for cut_dim in cut_dims}
    for steps in range(1, 8):
        wanted = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
        for begin in range(0, steps, INTERVAL):
            draw = partition.draw(cut_dims, begin // INTERVAL, len(outcomes))
            for rank in range(len(outcomes)):
                kept = {name: pieces[rank] for name, pieces in draw.items()}
                for key, block in blocks_of(model, MLP_LAYOUT, kept, units).items():
                    share = 1 / len(outcomes) if block.all() and len(outcomes) > 1 else 1
                    wanted[key][block] += share * min(INTERVAL, steps - begin)
        for rank in outcomes:
            rounds, merged, rounds_in_all, models = rank["steps_counted"][steps]
            assert rounds == steps // INTERVAL
            assert (merged == steps - steps % INTERVAL).all()
            assert rounds_in_all == rounds + (steps % INTERVAL > 0)
            for counted in models:
                for key, value in wanted.items():
                    torch.testing.assert_close(counted[key], value, rtol=1e-14, atol=0)
                outer = {key: value for key, value in counted.items() if key != "2.weight"}
                assert all((value == steps).all() for value in outer.values())


def test_every_unit_is_assigned_to_every_rank_and_to_one_in_a_round(outcomes):
    """A bug of published code: without row offsets only a part of a matrix was ever trained."""
    for index, (widths, _) in enumerate(PLACED):
        found = [rank["many_rounds"][index] for rank in outcomes]
        for name, units in zip(("0", "2"), widths, strict=True):
            for pieces in zip(*([each[name] for each in had] for had, _ in found), strict=True):
                assert torch.cat(pieces).sort().values.tolist() == list(range(units))
                assert sorted(map(len, pieces)) == sorted(sizes_of(units, len(outcomes)))
            for had, _ in found:
                assert set(torch.cat([each[name] for each in had]).tolist()) == set(range(units))
        for _, counted in found:
            inner = counted.pop("2.weight")
            assert all((value == ROUNDS).all() for value in counted.values())
            assert (inner > 0).all()
            assert len(outcomes) == 1 or (inner < ROUNDS).all()


def test_outputs_do_not_depend_on_the_batch(outcomes):
    for one_by_one, pairs, at_once in (rank["evaluated"] for rank in outcomes):
        torch.testing.assert_close(one_by_one, at_once, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(pairs, at_once, rtol=1e-13, atol=1e-13)
        assert torch.equal(at_once, outcomes[0]["evaluated"][2])


def test_bytes_sent_match_the_formula_and_no_indices_are_sent(outcomes):
    for kind, place in product(("sgd", "momentum", "adamw", "reset"), ("sharded", "central")):
        num, hidden = len(outcomes), 12
        one_way = BYTES * (5 * hidden + hidden * hidden // num + hidden * 3)
        copies = {"sgd": 1, "momentum": 2, "adamw": 3, "reset": 1}[kind]
        partition = Partition(seed=8)
        cut_dims = partition.cut_dims(smooth_mlp(hidden, hidden))
        leaving = [leaving_bytes(partition.draw(cut_dims, r, num), num, place) for r in range(3)]
        sent = [rank["traffic"][place, kind][0] for rank in outcomes]
        # Merge of a round's units and scatter of the next's, including optimizer state.
        assert sum(each[0] for each in sent) == leaving[0]
        for at in (1, 2):
            sent_in_round = sum(each[at] - each[at - 1] for each in sent)
            assert sent_in_round == copies * (leaving[at - 1] + leaving[at])
        for rank in outcomes:
            _, calls, payload = rank["traffic"][place, kind]
            assert payload == one_way
            check = ("_gather", 8 * 8)
            kinds = [name for name, _ in calls]
            assert kinds == ([] if num == 1 else ["_gather", *["all_to_all_single"] * 2] * 2)
            assert all(call == check for call in calls if call[0] == "_gather")
        ways = [
            [size for name, size in r["traffic"][place, kind][1] if "all_to" in name]
            for r in outcomes
        ]
        totals = [sum(each) for each in zip(*ways, strict=True)]
        assert totals == ([] if num == 1 else [copies * one_way] * 4)


def leaving_bytes(draw, num, place):
    """Return the bytes of the subnets' entries that are stored on another rank."""
    total = 0
    for rank in range(num):
        first, second = (draw[name][rank].tolist() for name in ("0", "2"))
        rows = [(row, 12, 5) for row in first]
        rows += [(row, 12, len(first)) for row in second]
        rows += [(row, 3, len(second)) for row in range(3)]
        total += sum(n for row, of, n in rows if owner_of(row, of, num, place) != rank)
    return BYTES * total


def owner_of(row, num_rows, num, place):
    if place == "central":
        return num - 1
    return next(o for o in range(num) if row < (o + 1) * num_rows // num)


def test_optimizer_state_moves_with_its_weight(outcomes):
    for name_of_rule, rule in RULES.items():
        torch.manual_seed(0)
        model = smooth_mlp(7, 13)
        partition = Partition(seed=5)
        draws = [partition.draw(partition.cut_dims(model), r, len(outcomes)) for r in range(4)]
        batches = [[batch_of(step, rank) for rank in range(len(outcomes))] for step in range(11)]
        state = train_together(model, MLP_LAYOUT, draws, batches, 3, rule)
        for rank in outcomes:
            for key, weight in rank["carried"][name_of_rule][0].items():
                torch.testing.assert_close(weight, model.state_dict()[key], rtol=1e-12, atol=1e-12)
        shards = [rank["carried"][name_of_rule][1] for rank in outcomes]
        for name, keys in shards[0].items():
            assert set(keys) == set(rule.keys)
            for key in keys:
                found = torch.cat([shard[name][key] for shard in shards])
                torch.testing.assert_close(found, state[name][key], rtol=1e-12, atol=1e-12)
        assert len(shards[0]) == 5


def test_a_rank_holds_one_part_in_n_squared_of_inner_weights_and_no_module(outcomes):
    num = len(outcomes)
    part = 12 * 12 // num**2
    assert [rank["memory"] for rank in outcomes] == [
        {
            "weights": part,
            "state": [part, part],
            "storage": part,
            "rows": 12 * 12 // num,
            "module": BYTES,
        }
    ] * num
