"""GossipDataParallel in a user's training loop, over gloo with one to four ranks."""

import copy
import gc
import weakref
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.comm import Run
from pyparallel.gossip import SGP, AllReduce
from pyparallel.gossip.join import JoinedRounds
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring
from pyparallel.gossip.validation import resolve_bucket_cap_mb
from pyparallel.training import ModelAverager
from tests.cases import slow
from tests.gossip.every_algorithm import DETERMINISTIC, EVERY_ALGORITHM, FEW
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import ALGORITHMS, step, wrap
from tests.local_transport import LocalRun
from tests.workers import assert_equal_on_all_ranks, on_ranks


@on_ranks(2)
def test_all_ranks_start_from_rank_zero(rank):
    states = [wrap(algorithm)[0].state_dict() for algorithm in ALGORITHMS]
    assert_equal_on_all_ranks([each.tolist() for state in states for each in state.values()])


def test_buckets_are_larger_on_gpus():
    """Where messages overlap with more than the step of another bucket."""
    module, overlaps = nn.Linear(2, 2), SGP(overlap=1)
    assert resolve_bucket_cap_mb(module, None, overlaps) == 25
    assert resolve_bucket_cap_mb(module.to("meta"), None, overlaps) == 256
    assert resolve_bucket_cap_mb(module, None, AllReduce()) == 256
    assert resolve_bucket_cap_mb(module, None, SGP()) == 64
    assert resolve_bucket_cap_mb(module, 3.5, SGP()) == 3.5


def consensus_and_back(rank, algorithm):
    model, optimizer = wrap(algorithm)
    for _ in range(3):
        step(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    with model.consensus() as averaged:
        assert averaged is model.module
        inside = copy.deepcopy(averaged.state_dict())
        assert model.consensus_distance() < 1e-12
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    whole = model.full_state_dict()
    assert whole.keys() == (set() if rank else inside.keys())
    assert all(torch.equal(whole[key], inside[key]) for key in whole)
    with pytest.raises(KeyError, match="inside"), model.consensus():
        raise KeyError("inside")
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in before)
    return before, inside, float(model.push_sum_weight), model.consensus_distance()


def test_consensus_is_the_exact_average_and_is_restored(ranks):
    results = ranks.run(4, consensus_and_back, SGP(StarWithChords(4)))
    total = sum(weight for _, _, weight, _ in results)
    parameters = [key for key in results[0][0] if "running" not in key and "num_" not in key]
    squares = 0.0
    for key in results[0][0]:
        if key.endswith("num_batches_tracked"):
            continue
        parts = [(state[key].double(), weight) for state, _, weight, _ in results]
        if key in parameters:
            mean = sum(weight * value for value, weight in parts) / total
            squares += sum(float((value - mean).square().sum()) for value, _ in parts)
        else:
            mean = sum(value for value, _ in parts) / 4  # statistics are not weighted
        for _, inside, _, _ in results:
            torch.testing.assert_close(inside[key], mean.float(), rtol=2e-7, atol=0)
    distances = [distance for *_, distance in results]
    assert distances == [distances[0]] * 4
    assert distances[0] == pytest.approx((squares / 4) ** 0.5, rel=1e-9)
    assert distances[0] > 0


def bytes_per_step(rank, algorithm):
    model, optimizer = wrap(algorithm)
    sent = []
    for _ in range(2):
        with model.no_sync():
            step(model, optimizer)
        sent.append(model.bytes_sent)
        step(model, optimizer)
        sent.append(model.bytes_sent)
    return sent, model.consensus_distance()


def test_no_sync_skips_the_communication(ranks):
    results = ranks.run_each(2, bytes_per_step, [(algorithm,) for algorithm in ALGORITHMS])
    for algorithm, found in zip(ALGORITHMS, results, strict=True):
        for (nothing, once, still_once, twice), distance in found:
            assert nothing == 0
            assert 0 < once == still_once
            assert twice == 2 * once
            assert distance > 0 or isinstance(algorithm, SGP)


def terminates_early(rank):
    model, optimizer = wrap(SGP(OnePeerExponential(2)), nn.Linear(4, 2))
    with model.join(throw_on_early_termination=True):
        for _ in range(5 + 3 * rank):
            step(model, optimizer)


def test_join_can_stop_all_ranks_with_the_first(ranks):
    assert all("exhausted" in outcome.error for outcome in ranks.observe(2, terminates_early))


NO_ROUND = (
    r"consensus\(\), .* must be called inside join\(\) only while all ranks have batches, got 1"
)


def calls_in_join(rank, algorithm, call):
    """Rank 1 runs out of batches, then rank 0 calls what all ranks must."""
    model, optimizer = wrap(algorithm, nn.Linear(4, 2))

    def train():
        with model.join():
            for number in range(6 - 4 * rank):
                step(model, optimizer)
                if number in (1, 3):
                    call(model)

    with pytest.raises(ValueError, match=NO_ROUND):
        train()


@pytest.mark.parametrize("overlap", [1, slow(0), slow(2)])
def test_what_is_no_round_is_one_error_once_a_rank_has_no_batches(ranks, overlap):
    calls = (
        GossipDataParallel.consensus_distance,
        GossipDataParallel.algorithm_state_dict,
        GossipDataParallel.flush,
    )
    for call in calls[:: 1 if overlap != 1 else 3]:
        ranks.run(2, calls_in_join, SGP(OnePeerExponential(2), overlap=overlap), call)


def distance_while_a_message_travels(rank):
    torch.manual_seed(rank)
    model, optimizer = wrap(SGP(OnePeerExponential(2), overlap=1), nn.Linear(4, 2))
    for _ in range(4):
        step(model, optimizer)
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = torch.stack([torch.empty_like(own) for _ in range(2)])
    dist.all_gather(list(both), own)
    expected = (both - both.mean(0)).square().sum(1).mean().sqrt()
    return float(expected), model.consensus_distance()


def test_the_distance_is_that_of_the_weights_that_a_forward_reads(ranks):
    for expected, found in ranks.run(2, distance_while_a_message_travels):
        assert found == pytest.approx(expected, rel=1e-5)
        assert found > 1e-3


def trains(rank, algorithm, make_model, dtype, make_optimizer):
    torch.manual_seed(0)
    model = make_model()
    target = nn.Linear(4, 2)
    optimizer = make_optimizer(model.parameters())
    wrapped = GossipDataParallel(model, optimizer, algorithm)
    torch.manual_seed(rank)
    losses = []
    for _ in range(60):
        inputs = torch.randn(16, 4)
        optimizer.zero_grad()
        outputs = wrapped(inputs.to(dtype)).float()
        loss = nn.functional.mse_loss(outputs, target(inputs).detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:5]) / 5, sum(losses[-5:]) / 5, wrapped.consensus_distance()


def small_model():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def bf16_model():
    return small_model().bfloat16()


def mixed_model():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), Upcast(), nn.Linear(16, 2).bfloat16())


class Upcast(nn.Module):
    def forward(self, inputs):
        return inputs.bfloat16()


def compiled_model():
    return torch.compile(small_model())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


MODELS = [
    (small_model, torch.float32, adamw),
    (bf16_model, torch.bfloat16, sgd),
    (mixed_model, torch.float32, sgd),
]


@pytest.mark.parametrize(
    "cases",
    [MODELS, slow([(compiled_model, torch.float32, sgd)])],
    ids=["dtypes", "inductor"],
)
def test_trains(ranks, cases):
    rows = [(algorithm, *case) for case in cases for algorithm in ALGORITHMS[::2]]
    for first, last, distance in chain(*ranks.run_each(2, trains, rows, time_limit=240)):
        assert last < 0.5 * first
        assert distance < 0.5


def works_on_a_subgroup(rank):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    model, optimizer = wrap(SGP(Complete(2)), nn.Linear(4, 2), process_group=group)
    step(model, optimizer)
    return model.module.weight.detach().clone()


def test_a_subgroup_gossips_alone(ranks):
    first, second, third, fourth = ranks.run(4, works_on_a_subgroup)
    torch.testing.assert_close(first, third)
    torch.testing.assert_close(second, fourth)
    assert not torch.allclose(first, second)


@on_ranks(2)
def test_close_stops_the_communication(rank):
    model, optimizer = wrap(SGP(Complete(2)), nn.Linear(4, 2))
    step(model, optimizer)
    model.close()
    if rank == 0:  # would wait for rank 1 if it still gossiped
        model.module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="must not be used after close"):
        model(torch.ones(1, 4))


@on_ranks(1)
def test_a_dropped_trainer_is_freed_without_garbage_collection(rank):
    """Nothing is left of a trainer once it and the optimizer are dropped."""
    # Or else it would keep gloo's threads beyond destroy_process_group().
    gc.disable()
    for algorithm in (SGP(Ring(1), overlap=1), AllReduce()):
        model, optimizer = wrap(algorithm)
        step(model, optimizer)
        left = [weakref.ref(each) for each in (model, model._running)]
        del model, optimizer
        assert [each() for each in left] == [None, None], algorithm
    gc.enable()


def frozen_and_tied(rank):
    tied = nn.Linear(4, 4)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(
        tied, frozen, tied, nn.Conv2d(1, 2, 1).to(memory_format=torch.channels_last)
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    GossipDataParallel(model, optimizer, SGP(Complete(2)))
    model[:3](torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_frozen_and_tied_parameters_and_channels_last(ranks):
    torch.testing.assert_close(*ranks.run(2, frozen_and_tied))


def fine_tune(rank, name, given):
    """Train with a frozen layer; the optimizer is given all parameters, or the trainable ones."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    before = [p.clone() for p in model[0].parameters()]
    chosen = [p for p in model.parameters() if given == "all" or p.requires_grad]
    optimizer = torch.optim.SGD(chosen, lr=0.1, momentum=0.9, weight_decay=0.1)
    gdp = GossipDataParallel(model, optimizer, EVERY_ALGORITHM[name](4))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        loss = gdp(torch.randn(6, 4, generator=generator)).square().mean()
        loss.backward()
        gdp.record_loss(loss)
        optimizer.step()
    trained = [p.detach().clone() for p in model.parameters()]
    with gdp.consensus() as averaged:
        consensus = [p.detach().clone() for p in averaged.parameters()]
    return rank or before, trained, consensus


def fine_tune_all(rank, names):
    return {n: [fine_tune(rank, n, given) for given in ("all", "trainable")] for n in names}


@pytest.mark.parametrize("names", [FEW, slow(DETERMINISTIC)], ids=["few", "all"])
def test_frozen_parameters_may_be_in_the_optimizer(ranks, subtests, names):
    results = ranks.run(4, fine_tune_all, names)
    for name in names:
        with subtests.test(name):
            frozen_at_start = results[0][name][0][0]
            for (_, *with_all), (_, *without) in (found[name] for found in results):
                for mine, other in zip(with_all, without, strict=True):
                    assert all(map(torch.equal, mine, other))  # bit for bit
                for parameters in with_all:  # trained, and in the consensus
                    assert all(map(torch.equal, parameters, frozen_at_start))


# ------------------------------------------------------------------------ join(), without processes


def test_ranks_join_in_the_process_group_or_in_the_default_one():
    group = dist.ProcessGroup(0, 1)
    averager = ModelAverager([torch.zeros(1)])
    assert JoinedRounds(averager, LocalRun(0, 1, group=group)).join_process_group is group
    assert JoinedRounds(averager, Run()).join_process_group is dist.group.WORLD
    JoinedRounds(averager, Run()).before_round()  # outside of join() there are none
