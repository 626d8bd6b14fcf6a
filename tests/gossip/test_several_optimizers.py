"""A list of optimizers, such as Muon for matrices and AdamW for the rest."""

import gc
import io
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel, optim
from pyparallel.comm import NonFiniteError
from pyparallel.gossip import SGP, AllReduce, GossipState, LocalSGD
from pyparallel.gossip.algorithms.sgp import sgp
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring
from tests.cases import slow
from tests.gossip.every_algorithm import DETERMINISTIC, EVERY_ALGORITHM, FEW
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import batches, build_model, flat
from tests.workers import on_ranks


def split(model):
    """Return a model's matrices and its other parameters."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def muon_and_adamw(model, **options):
    matrices, others = split(model)
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.1, **options),
    ]


def backward(model, data):
    inputs, targets = data
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


def train(model, optimizers, data, schedulers=()):
    """Train as a user does, with the optimizers in another order in every step."""
    for index, batch in enumerate(data):
        loss = backward(model, batch)
        if isinstance(model, GossipDataParallel):
            model.record_loss(loss)
        for each in optimizers[:: 1 if index % 2 else -1]:
            each.step()
        for each in schedulers:
            each.step()


# --------------------------------------------------------------------------- against the paper


def algorithm_1(topology, num_steps):
    """Algorithm 1 of Assran et al. with both optimizers on each rank's numerator x; return z, w."""
    models = [build_model() for _ in range(topology.num_ranks)]
    optimizers = [muon_and_adamw(model) for model in models]
    data = [list(batches(rank, num_steps)) for rank in range(topology.num_ranks)]
    x, w = torch.stack([flat(model).double() for model in models]), torch.ones(len(models), 1)

    def update(z):
        for rank, model in enumerate(models):
            nn.utils.vector_to_parameters(z[rank].float(), model.parameters())
            backward(model, data[rank][step])
            nn.utils.vector_to_parameters(x[rank].float(), model.parameters())
            for each in optimizers[rank]:
                each.step()
        return x - torch.stack([flat(model) for model in models])

    for step in range(num_steps):
        x, w = sgp(x, w.double(), update, torch.from_numpy(topology.mixing_matrix(step)))
    return (x / w).float(), w


def train_sgp(rank, topology, num_steps):
    model = build_model()
    optimizers = muon_and_adamw(model)
    wrapped = GossipDataParallel(model, optimizers, SGP(topology))
    train(wrapped, optimizers, batches(rank, num_steps))
    return flat(model), float(wrapped.push_sum_weight)


@pytest.mark.parametrize("topology", [slow(OnePeerExponential(4)), StarWithChords(4)])
def test_sgp_with_muon_and_adamw_is_algorithm_1(ranks, topology):
    expected, weights = algorithm_1(topology, 6)
    moved = flat(build_model()) - expected[0]
    assert moved.abs().max() > 0.04
    for rank, (z, w) in enumerate(ranks.run(4, train_sgp, topology, 6)):
        assert w == pytest.approx(float(weights[rank]))
        # Muon orthogonalizes in bfloat16, whose last bit is 1e-4 of these parameters.
        torch.testing.assert_close(z, expected[rank], rtol=0, atol=4e-4)


# ------------------------------------------------------------- against one optimizer of two groups


def sgd(kind, parameters, lr):
    return kind(parameters, lr=lr, momentum=0.9, weight_decay=0.01)


def train_with(algorithm, make, has_unequal_batches=False):
    """Return all that a run with schedulers ends with; ``make`` creates the argument."""
    model = build_model()
    given = make(*split(model))
    wrapped = GossipDataParallel(model, given, algorithm)
    optimizers = given if isinstance(given, list) else [given]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, gamma=0.5) for each in optimizers]
    num_steps = 7 + (dist.get_rank() if has_unequal_batches else 0)
    with wrapped.join(enable=has_unequal_batches):
        train(wrapped, optimizers, batches(dist.get_rank(), num_steps), schedulers)
    wrapped.flush()
    result = flat(model).clone(), float(wrapped.push_sum_weight), wrapped.bytes_sent
    wrapped.close()
    return result


def two_of(kind):
    return lambda a, b: [sgd(kind, a, 0.05), sgd(kind, b, 0.1)]


def one_of(kind):
    return lambda a, b: sgd(kind, [{"params": a}, {"params": b, "lr": 0.1}], 0.05)


def equals_one_optimizer(rank, name):
    algorithm, joins = EVERY_ALGORITHM[name](4), name in ("sgp-star", "allreduce")
    one = train_with(algorithm, one_of(torch.optim.SGD), joins)
    two = train_with(algorithm, two_of(torch.optim.SGD), joins)
    assert torch.equal(one[0], two[0])
    assert one[1:] == two[1:]


@pytest.mark.parametrize("names", [FEW, slow(DETERMINISTIC)], ids=["few", "all"])
def test_two_optimizers_equal_one_of_two_groups_bit_for_bit(ranks, names):
    ranks.run_each(4, equals_one_optimizer, [(name,) for name in names])


@on_ranks(4)
def test_fused_optimizers_may_be_in_the_list(rank):
    for name in ("sgp-star", "leadersgd"):
        algorithm = EVERY_ALGORITHM[name](4)
        torchs = train_with(algorithm, one_of(torch.optim.SGD))
        fused = train_with(algorithm, one_of(optim.SGD))
        listed = train_with(algorithm, lambda a, b: [one_of(optim.SGD)(a, b)])
        assert torch.equal(fused[0], listed[0])
        assert fused[1:] == listed[1:]
        for make in (
            two_of(optim.SGD),
            lambda a, b: [sgd(optim.SGD, a, 0.05), sgd(torch.optim.SGD, b, 0.1)],
            lambda a, b: [sgd(torch.optim.SGD, a, 0.05), sgd(optim.SGD, b, 0.1)],
        ):
            torch.testing.assert_close(train_with(algorithm, make)[0], torchs[0])


# ------------------------------------------------------------------------------ inf and nan


def train_scaled(model, optimizers, data, forward=None, spoiled=None):
    """Train with a GradScaler; in step 2 the gradient of parameter ``spoiled`` is inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step, (inputs, targets) in enumerate(data):
        for each in optimizers:
            each.zero_grad()
        loss = nn.functional.mse_loss((forward or model)(inputs), targets)
        scaler.scale(loss).backward()
        if step == 2 and spoiled is not None:
            list(model.parameters())[spoiled].grad[0] = float("inf")
        if step % 2:
            for each in optimizers:
                scaler.unscale_(each)
        for each in optimizers:
            scaler.step(each)
        scaler.update()
    return flat(model).clone(), scaler.get_scale()


MATRIX, VECTOR = 0, 1  # of Muon, of AdamW


def scaled_like_torch(rank):
    found = {}
    for spoiled in (None, MATRIX, VECTOR):
        for fused in (False, True):
            model = build_model()
            optimizers = muon_and_adamw(model, fused=fused)
            alone = train_scaled(model, optimizers, batches(0, 6), spoiled=spoiled)
            model = build_model()
            optimizers = muon_and_adamw(model, fused=fused)
            wrapped = GossipDataParallel(model, optimizers, SGP(Ring(2)))
            result = train_scaled(model, optimizers, batches(0, 6), wrapped, spoiled)
            found[spoiled, fused] = torch.equal(result[0], alone[0]) and result[1] == alone[1]
            sent = wrapped.bytes_sent
            wrapped.close()
    return found, sent


def test_a_scaler_skips_the_optimizer_with_the_inf_alone_and_the_round_is_taken(ranks):
    (found, sent), (others, others_sent) = ranks.run(2, scaled_like_torch)
    assert all(found.values()), found
    assert all(others.values()), others
    assert sent == others_sent > 0


def spoil(policy, spoiled, make=muon_and_adamw):
    """Return which parameters a step with a nan on rank 0 has changed, and what it raised."""
    model = build_model()
    optimizers = make(model)
    wrapped = GossipDataParallel(model, optimizers, LocalSGD(3), nonfinite=policy)
    backward(wrapped, next(batches(dist.get_rank(), 1)))
    if dist.get_rank() == 0:
        list(model.parameters())[spoiled].grad[0] = float("nan")
    gradients = [p.grad for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    optimizers[0].step()
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    error = None
    try:
        optimizers[1].step()
    except NonFiniteError as raised:
        error = str(raised)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert wrapped._run.counts.steps == 1
    after = [p.detach().clone() for p in model.parameters()]
    wrapped.close()
    return [not torch.equal(a, b) for a, b in zip(after, before, strict=True)], error


def fused_sgd_and_adamw(model):
    matrices, others = split(model)
    return [optim.SGD(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)]


def spoil_all(rank):
    return {
        (policy, spoiled, make.__name__): spoil(policy, spoiled, make)
        for policy in ("raise", "skip", "allow")
        for spoiled in (MATRIX, VECTOR)
        for make in (muon_and_adamw, fused_sgd_and_adamw)
    }


def test_the_policy_decides_over_all_optimizers_before_the_first_one(ranks, subtests):
    own, other = ranks.run(2, spoil_all)
    for key, (changed, error) in own.items():
        policy, spoiled, _ = key
        with subtests.test(str(key)):
            assert changed == [policy == "allow"] * 4
            assert all(other[key][0])
            assert (error is not None) == (policy == "raise")
            if error:
                name = ["0.weight", "0.bias"][spoiled]
                assert "rank 0, step 1: gradients must be finite" in error
                assert f"the first in {name}" in error


# ------------------------------------------------------------------------------ order of the steps


SECOND = (
    "each of several optimizers must take one step in a training step, got a second one of Muon "
    "(optimizer[0]) before one of AdamW (optimizer[1]); nothing has been stepped: call step() of "
    "AdamW (optimizer[1]) first, in every training step"
)
CLOSURE = "several optimizers must be stepped without a closure"


@on_ranks(4)
def test_a_misused_step_is_one_error_and_nothing_is_lost(rank):
    """The run that it interrupts ends as one without it."""
    results = []
    for misuses in (False, True):
        model = build_model()
        muon, adamw = optimizers = muon_and_adamw(model)
        wrapped = GossipDataParallel(model, optimizers, SGP(StarWithChords(4)))
        for index, batch in enumerate(batches(rank, 5)):
            backward(wrapped, batch)
            muon.step()
            if misuses and index == 2:
                before = flat(model).clone()
                with pytest.raises(RuntimeError, match=f"^{re.escape(SECOND)}$"):
                    muon.step()
                with pytest.raises(RuntimeError, match=CLOSURE):
                    adamw.step(lambda: 1.0)
                after = r"states must be saved between .*after a step of Muon .* and none of AdamW"
                with pytest.raises(ValueError, match=after):
                    GossipState(wrapped, optimizers).state_dict()
                wrapped.eval()
                with torch.no_grad():
                    wrapped(batch[0])
                wrapped.train()
                torch.testing.assert_close(flat(model), before)  # z at any time
            adamw.step()
        wrapped.flush()
        results.append((flat(model).clone(), float(wrapped.push_sum_weight)))
        assert wrapped._run.counts.steps == 5
        wrapped.close()
    (clean, mass), (interrupted, its_mass) = results
    torch.testing.assert_close(interrupted, clean, rtol=0, atol=4e-4)
    assert its_mass == mass


class Both(torch.optim.Optimizer):
    """A user's wrapper of several optimizers."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()


@on_ranks(1)
def test_trainers_are_freed_and_closed(rank):
    gc.disable()
    model = build_model()
    optimizers = muon_and_adamw(model)
    wrapped = GossipDataParallel(model, optimizers, SGP(Ring(1), overlap=1))
    train(wrapped, optimizers, batches(0, 2))
    left = [weakref.ref(each) for each in (wrapped, wrapped._running)]
    Both(optimizers).step()
    assert wrapped._run.counts.steps == 3
    del wrapped, optimizers
    assert [each() for each in left] == [None, None]
    gc.enable()
    optimizers = [optim.SGD(split(model)[0], lr=0.1), torch.optim.SGD(split(model)[1], lr=0.1)]
    wrapped = GossipDataParallel(model, optimizers, SGP(Ring(1)))
    wrapped.close()
    backward(model, next(batches(0, 1)))
    for each in (*optimizers, *optimizers):  # in any order again
        each.step()
    wrapped = GossipDataParallel(model, optimizers, SGP(Ring(1)))
    del optimizers[0]  # the fused one, whose buckets hold it
    gc.collect()
    backward(wrapped, next(batches(0, 1)))
    with pytest.raises(RuntimeError, match=r"after SGD \(optimizer\[0\]\) was deleted"):
        optimizers[0].step()


# ------------------------------------------------------------------------------ saved states


def resume(rank, name):
    """Return a run resumed after 5 of 8 steps, its state, and the parameters without a stop."""
    data, algorithm = list(batches(rank, 8)), EVERY_ALGORITHM[name](2)

    def build():
        model = build_model()
        optimizers = muon_and_adamw(model)
        return model, optimizers, GossipDataParallel(model, optimizers, algorithm)

    model, optimizers, wrapped = build()
    train(wrapped, optimizers, data[:5])
    file = io.BytesIO()
    torch.save(GossipState(wrapped, optimizers).state_dict(), file)
    train(wrapped, optimizers, data[5:])
    wrapped.flush()
    expected = flat(model).clone()
    wrapped.close()
    model, optimizers, wrapped = build()
    backward(wrapped, data[0])
    optimizers[0].step()  # a training step that is interrupted
    file.seek(0)
    GossipState(wrapped, optimizers).load_state_dict(torch.load(file))
    wrapped.module.zero_grad()
    train(wrapped, optimizers, data[5:])
    file.seek(0)
    return model, optimizers, wrapped, torch.load(file), expected


@on_ranks(2)
def test_a_run_resumes_bit_for_bit(rank):
    for name in ("sgp-overlap-1", "slowmo", "allreduce"):
        model, optimizers, wrapped, saved, expected = resume(rank, name)
        wrapped.flush()
        assert torch.equal(flat(model), expected), name
        with pytest.raises(ValueError, match="optimizer must be what the trainer"):
            GossipState(wrapped, optimizers[0])
        with pytest.raises(ValueError, match="Muon, AdamW, got AdamW, Muon"):
            GossipState(wrapped, optimizers[::-1])
        wrapped.close()
        model = build_model()
        one = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped = GossipDataParallel(model, one, EVERY_ALGORITHM[name](2))
        rule = "^ranks 0-1: state_dict must be of the same optimizers, AdamW, got Muon, AdamW$"
        with pytest.raises(ValueError, match=rule):
            GossipState(wrapped, one).load_state_dict(saved)
        (values,) = (each.values for each in GossipState(wrapped, [one]).state_dict().values())
        assert values["optimizer_kinds"] == ["AdamW"]
        assert values["optimizers"][0].keys() == one.state_dict().keys()
        wrapped.close()


# ------------------------------------------------------------------------------ bad input


def overlapping(model):
    muon, _ = muon_and_adamw(model)
    return [muon, torch.optim.AdamW(model.parameters(), lr=0.01)]


def twice(model):
    optimizers = muon_and_adamw(model)
    return [*optimizers, optimizers[0]]


# What rank 1 is given, and the sentence that all ranks raise.
MISTAKES = {
    "parameter in two": (
        overlapping,
        "rank 1: a parameter must be in one optimizer, got 0.weight in Muon (optimizer[0]) and "
        "AdamW (optimizer[1]); remove it from one of them",
    ),
    "parameter in none": (
        lambda model: [
            torch.optim.Muon(split(model)[0], lr=0.1),
            torch.optim.SGD(split(model)[1][:1], lr=0.1),
        ],
        "rank 1: optimizer must own all trainable parameters of the module, got one without "
        "2.bias; add them, or freeze them with requires_grad_(False)",
    ),
    "empty": (
        lambda model: [],
        "rank 1: optimizer must be a torch optimizer or a list of them, got an empty list",
    ),
    "twice": (
        twice,
        "rank 1: optimizer must hold each optimizer once, got Muon (optimizer[0]) again as "
        "optimizer[2]; remove one",
    ),
    "no optimizer": (
        lambda model: [muon_and_adamw(model)[0], torch.optim.AdamW],
        "rank 1: optimizer[1] must be a torch optimizer such as SGD(module.parameters(), lr=0.1), "
        "got the class AdamW; create an object, AdamW(...)",
    ),
    "other order": (
        lambda model: muon_and_adamw(model)[::-1],
        "all ranks must have the same optimizers, got Muon, AdamW on rank 0 and AdamW, Muon on "
        "rank 1",
    ),
    "one": (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "all ranks must have the same optimizers, got Muon, AdamW on rank 0 and one on rank 1",
    ),
    "other buckets": (
        lambda model: [optim.AdamW(split(model)[0], lr=0.1), optim.SGD(split(model)[1], lr=0.1)],
        "all ranks must have the same optimizers, got Muon, AdamW on rank 0 and AdamW, SGD on "
        "rank 1",
    ),
}


@on_ranks(2)
def test_a_mistake_is_one_sentence_on_every_rank(rank):
    for name, (make, expected) in MISTAKES.items():
        model = build_model()
        optimizers = (make if rank == 1 else muon_and_adamw)(model)
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(ValueError, match="must") as raised:
            GossipDataParallel(model, optimizers, AllReduce())
        assert before == [p.data_ptr() for p in model.parameters()]
        assert isinstance(raised.value, TypeError) == (name == "no optimizer")
        assert str(raised.value) == expected, name
    GossipDataParallel(model := build_model(), tuple(muon_and_adamw(model)), SGP(Complete(2)))
