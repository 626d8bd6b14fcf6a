"""Outer steps of fragments, compressed and late, against the papers' rules in float64."""

import copy

import pytest
import torch
import torch.distributed as dist

from pyparallel.compression import ErrorFeedback, TopK
from pyparallel.gossip import DiLoCo, MuLoCo, NoLoCo, SlowMo, SparseLoCo, StreamingDiLoCo
from pyparallel.gossip.algorithms.diloco import OuterOptimizerRule
from pyparallel.gossip.algorithms.fragments import find_fragments
from pyparallel.gossip.topology import Hypercube
from pyparallel.training import FlatBuckets
from tests.gossip.loops import batches, build_model, flat, start, train

RANKS, INTERVAL, STEPS, LR = 2, 4, 19, 0.05
LAYERS = [["0"], ["2"]]
MOMENTUM, OUTER_LR = 0.6, 0.5


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=OUTER_LR, momentum=MOMENTUM, nesterov=True)


def largest(x, density):
    """Return the largest entries of x and zeros."""
    kept = x.abs().topk(max(1, round(density * x.numel()))).indices
    return torch.zeros_like(x).index_copy(0, kept, x[kept])


def stream(parts, delay, mix, density=None, error_feedback=True):
    """Train all ranks in turn, as streaming DiLoCo does with fragments of these parameters.

    Douillard et al., arXiv 2501.18512: at its time a fragment's difference to the outer weights is
    sent; ``delay`` steps later the outer optimizer takes its mean, and a rank mixes its own weights
    with the outer ones. With a density, a rank sends the largest entries of its difference and of
    what it has not sent before (SparseLoCo).
    """
    models = [build_model(torch.float64) for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    data = [list(batches(rank, STEPS, dtype=torch.float64)) for rank in range(RANKS)]

    def part(rank, names):
        return [p for name, p in models[rank].named_parameters() if name.split(".")[0] in names]

    outer = [torch.cat([p.detach().flatten() for p in part(0, names)]) for names in parts]
    velocity = [torch.zeros_like(each) for each in outer]
    errors = [[torch.zeros_like(each) for _ in range(RANKS)] for each in outer]
    in_flight = {}
    for step in range(1, STEPS + 1):
        for rank in range(RANKS):
            train(models[rank], optimizers[rank], [data[rank][step - 1]])
        for index, names in enumerate(parts):
            offset = (index + 1) * INTERVAL // len(parts)
            if step >= offset and (step - offset) % INTERVAL == 0:
                sent = []
                for rank in range(RANKS):
                    own = torch.cat([p.detach().flatten() for p in part(rank, names)])
                    difference = outer[index] - own
                    if density:
                        total = difference + errors[index][rank]
                        difference = largest(total, density)
                        if error_feedback:
                            errors[index][rank] = total - difference
                    sent.append(difference)
                in_flight[index] = step, sum(sent) / RANKS
            if index in in_flight and step - in_flight[index][0] == delay:
                gradient = in_flight.pop(index)[1]
                velocity[index] = MOMENTUM * velocity[index] + gradient
                outer[index] = outer[index] - OUTER_LR * (gradient + MOMENTUM * velocity[index])
                for rank in range(RANKS):
                    mine = part(rank, names)
                    pieces = outer[index].split([p.numel() for p in mine])
                    with torch.no_grad():
                        for p, new in zip(mine, pieces, strict=True):
                            p.copy_(mix * p + (1 - mix) * new.view_as(p))
    return [flat(model) for model in models]


def train_rank(rank, options, cap):
    algorithm = DiLoCo(INTERVAL, nesterov, **options)
    dtype = torch.float32 if "compressor" in options else torch.float64
    model, optimizer, wrapped = start(algorithm, lr=LR, cap=cap, dtype=dtype)
    return train(model, optimizer, list(batches(rank, STEPS, dtype=dtype)), forward=wrapped)


WHOLE = [["0", "2"]]
SPARSE, FED_BACK = {"compressor": TopK(0.2)}, {"compressor": ErrorFeedback(TopK(0.2))}
# A buffer for each parameter with the smallest cap: of sparse messages it must be the layer.
CASES = [  # options of the algorithm, MiB of buckets, arguments of `stream`
    ({}, 1e-4, (WHOLE, 0, 0)),
    ({"fragments": 2}, 1e-4, (LAYERS, 0, 0)),
    ({"fragments": [["2"], ["0.weight", "0.bias"]], "mix": 0.25}, 1e-4, ([["2"], ["0"]], 0, 0.25)),
    ({"delay": 3}, 1e-4, (WHOLE, 3, 0.5)),
    ({"fragments": 2, "delay": 2, "mix": 0.3}, 1e-4, (LAYERS, 2, 0.3)),
    ({"fragments": 2, **SPARSE}, 25.0, (LAYERS, 0, 0, 0.2, False)),
    ({"fragments": 2, "delay": 1, **FED_BACK}, 25.0, (LAYERS, 1, 0.5, 0.2)),
]


def test_outer_steps_follow_the_paper(ranks):
    results = ranks.run_each(RANKS, train_rank, [case[:2] for case in CASES])
    for (*_, arguments), found in zip(CASES, results, strict=True):
        for ours, theirs in zip(found, stream(*arguments), strict=True):
            most = 1e-5 if ours.dtype == torch.float32 else 1e-12
            torch.testing.assert_close(ours.double(), theirs, rtol=most, atol=most / 10)


def test_the_outer_rule_in_float64():
    weights = torch.randn(9, dtype=torch.float64)
    rule = OuterOptimizerRule(nesterov, [weights.clone()])
    outer, velocity = weights.clone(), torch.zeros_like(weights)
    for seed in range(5):
        average = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        velocity = MOMENTUM * velocity + outer - average
        outer = outer - OUTER_LR * (outer - average + MOMENTUM * velocity)
        torch.testing.assert_close(rule.step([average])[0], outer, rtol=1e-12, atol=1e-12)


STREAMED = {"fragments": 2, "delay": 3}
RESUMED = [
    DiLoCo(INTERVAL, nesterov, **FED_BACK, **STREAMED),
    NoLoCo(Hypercube(RANKS), INTERVAL, **FED_BACK, **STREAMED),
    SlowMo(None, INTERVAL, reset_momentum=False, **STREAMED),
    StreamingDiLoCo(INTERVAL, **STREAMED),
    SparseLoCo(INTERVAL, **STREAMED),
    MuLoCo(INTERVAL, **STREAMED),
]


def resume(rank, algorithm):
    """Return whether a run that loads a state with messages in flight is the same as without."""
    data = list(batches(rank, STEPS))
    model, optimizer, wrapped = start(algorithm, lr=LR)
    train(model, optimizer, data[:8], forward=wrapped)
    state = copy.deepcopy(wrapped.algorithm_state_dict())
    assert None not in state["in_flight"]
    weights = {name: value.clone() for name, value in wrapped.state_dict().items()}
    expected = train(model, optimizer, data[8:], forward=wrapped).clone()
    model, optimizer, other = start(algorithm, lr=LR)
    train(model, optimizer, data[:3], forward=other)
    other.load_state_dict(weights)
    other.load_algorithm_state_dict(state)
    return torch.equal(train(model, optimizer, data[8:], forward=other), expected)


def test_a_state_holds_what_is_in_flight(ranks):
    found = ranks.run_each(RANKS, resume, [(algorithm,) for algorithm in RESUMED])
    assert found == [(True,) * RANKS] * len(RESUMED)


def go_ahead(rank, algorithms):
    """Take the steps of a delay before another rank has sent anything."""
    store = dist.group.WORLD.get_group_store()
    for number, algorithm in enumerate(algorithms):
        model, optimizer, wrapped = start(algorithm, lr=LR)
        data = list(batches(rank, INTERVAL + 2))
        train(model, optimizer, data[: INTERVAL - 1], forward=wrapped)
        if rank:
            store.get(f"ahead {number}")  # waits for it
        train(model, optimizer, data[INTERVAL - 1 : INTERVAL + 1], forward=wrapped)
        store.set(f"ahead {number}", "")
        train(model, optimizer, data[INTERVAL + 1 :], forward=wrapped)
        metrics = wrapped.metrics()
        assert metrics["rank/bytes_sent"] > 0
    return metrics["rank/hidden_seconds"]


def test_ranks_compute_while_messages_travel(ranks):
    algorithms = [NoLoCo(Hypercube(RANKS), INTERVAL, delay=2), DiLoCo(INTERVAL, delay=2)]
    assert min(ranks.run(RANKS, go_ahead, algorithms)) > 0


def close_in_flight(rank):
    algorithm = DiLoCo(INTERVAL, delay=3, fragments=2, compressor=ErrorFeedback(TopK(0.2)))
    for _ in range(5):
        model, optimizer, wrapped = start(algorithm, lr=LR)
        train(model, optimizer, list(batches(rank, INTERVAL)), forward=wrapped)
        wrapped.close()


def test_a_trainer_that_is_closed_ends_what_is_in_flight_on_all_ranks(ranks):
    ranks.run(RANKS, close_in_flight)


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        (3, "fragments must be at most the model's number of layers, 2, got 3"),
        ([["0"]], "each trainable parameter in one fragment, got 2.weight in none"),
        (
            [["0", "2"], ["2"]],
            r"each trainable parameter in one fragment, got 2.weight in \[0, 1\]",
        ),
        ([["0", "2"], ["1"]], r"fragments must have parameters each, got none in fragments \[1\]"),
    ],
)
def test_fragments_that_do_not_fit_the_model_are_refused(fragments, message):
    model = build_model()
    buckets = FlatBuckets(list(model.parameters()), 2**20)
    with pytest.raises(ValueError, match=message):
        find_fragments(model, buckets, fragments)
