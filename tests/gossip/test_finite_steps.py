"""Steps with an inf or a nan, under AMP's GradScaler or by policy: they still take their round."""

import contextlib
from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel import GossipDataParallel, optim
from pyparallel.comm import NonFiniteError, StepCounts
from pyparallel.gossip import SGP, AllReduce, LocalSGD
from pyparallel.gossip.topology import Complete, Ring
from pyparallel.ops._corrupt import CorruptCounter
from pyparallel.optim.finite_steps import FiniteSteps
from tests.cases import pairwise, slow
from tests.gossip.loops import batches, build_model, flat
from tests.workers import on_ranks

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "pyparallel": lambda parameters: optim.AdamW(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def train(model, optimizer, data, forward=None, spoiled=None, clips=False):
    """Train with a loss scale of 2**16; in step ``spoiled`` one gradient is inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    for step, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss((forward or model)(inputs), targets)
        scaler.scale(loss).backward()
        if step == spoiled:
            next(model.parameters()).grad[0] = float("inf")
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        assert all(parameter.grad is not None for parameter in model.parameters())
        scaler.update()
    return flat(model), scaler.get_scale()


def train_wrapped(rank, name, algorithm, spoiled, clips, same_data):
    model = build_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    wrapped = GossipDataParallel(model, optimizer, algorithm)
    data = list(batches(0 if same_data else rank, 8))
    spoiled = spoiled if rank == 0 or same_data else None
    result = train(model, optimizer, data, wrapped, spoiled, clips)
    wrapped.flush()
    return *result, flat(model), float(wrapped.push_sum_weight)


def train_alone(name, spoiled, clips):
    model = build_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    return train(model, optimizer, list(batches(0, 8)), spoiled=spoiled, clips=clips)


@on_ranks(2)
def test_equals_training_alone_bit_for_bit(rank):
    for clips, name in product((False, True), sorted(OPTIMIZERS.keys() - {"pyparallel"})):
        alone, scale = train_alone(name, 4, clips)
        result, its_scale, *_ = train_wrapped(rank, name, SGP(Ring(2)), 4, clips, True)
        assert torch.equal(result, alone), (name, clips)
        assert its_scale == scale


@on_ranks(1)
def test_close_restores_the_optimizer(rank):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = GossipDataParallel(model, optimizer, SGP(Ring(1)))
    assert hasattr(optimizer, "_step_supports_amp_scaling")
    wrapped.close()
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def spoil(rank, policy, name, algorithm):
    """Take 8 steps, the fourth one with a nan on rank 0; return what each step has raised."""
    model = build_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    wrapped = GossipDataParallel(model, optimizer, algorithm, nonfinite=policy)
    errors, before = [], None
    for step, (inputs, targets) in enumerate(batches(rank, 8)):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(inputs).square().mean().backward()
        is_spoiled = (rank, step) == (0, 3)
        loss = torch.nn.functional.mse_loss(wrapped(inputs), targets)
        loss *= float("nan") if is_spoiled and isinstance(algorithm, AllReduce) else 1.0
        loss.backward()
        first, second, *_ = model.parameters()
        if is_spoiled and not isinstance(algorithm, AllReduce):
            second.grad[:2] = torch.tensor([float("nan"), float("inf")])
        gradients = [p.grad.clone() for p in model.parameters()]
        before = first.detach().clone()
        try:
            optimizer.step()
        except NonFiniteError as error:
            errors.append((step, str(error)))
        if is_spoiled and isinstance(algorithm, LocalSGD):
            in_pass = name == "pyparallel" and policy == "raise"  # only such elements are left out
            assert torch.equal(first, before) == (policy != "allow" and not in_pass)
            assert wrapped._averager.run.counts.nonfinite == (2.0 if policy != "allow" else 0.0)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad.nan_to_num(), gradient.nan_to_num())
    with contextlib.suppress(NonFiniteError):
        wrapped.flush()
    counts = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert not hasattr(optimizer, "found_inf")
    result = errors, flat(model), float(wrapped.push_sum_weight), counts
    wrapped.close()
    return result


AXES = (
    ("raise", "skip", "allow"),
    ("sgd", "adamw, fused", "pyparallel", "rmsprop"),
    (SGP(Complete(2)), SGP(Ring(2), overlap=1), LocalSGD(3), AllReduce()),
)


def spoil_all(rank, rows):
    return {
        (name, str(each), policy): spoil(rank, policy, name, each) for policy, name, each in rows
    }


@pytest.mark.parametrize("rows", [pairwise(*AXES), slow([*product(*AXES)])], ids=["pairs", "all"])
def test_a_step_with_a_nan_is_taken_by_the_policy(ranks, subtests, rows):
    own, other = ranks.run(2, spoil_all, rows)
    for key, (errors, values, weight, counts) in own.items():
        name, algorithm, policy = key
        with subtests.test(str(key)):
            assert weight == 1.0
            others_errors, others_values, others_weight, _ = other[key]
            assert others_weight == 1.0
            is_finite = bool(values.isfinite().all()) and bool(others_values.isfinite().all())
            assert is_finite == (policy != "allow")
            if policy != "raise":
                assert errors == others_errors == []
            else:
                step, text = errors[0]
                assert step == 3
                assert text.startswith("rank 0, step 4: gradients must be finite, got ")
                assert "that are nan or inf, the first in 0." in text
                if "LocalSGD" not in algorithm:  # a message, or DDP, tells the other rank
                    (step, text), *_ = others_errors
                    assert step == (4 if "overlap=1" in algorithm else 3)
                    assert ("rank 1, step 4" if "AllReduce" in algorithm else "rank 0") in text
            if name == "adamw, fused":
                assert counts == ({8.0} if policy == "allow" else {7.0})


@on_ranks(1)
def test_large_sparse_and_missing_gradients(rank):
    """A norm that overflows in float32 is no inf; sparse and missing gradients are read, too."""
    model = torch.nn.ModuleList([torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    GossipDataParallel(model, optimizer, SGP(Ring(1)))
    model[0](torch.tensor([1, 3])).sum().backward()
    model[1].bias.grad = torch.full((2,), 1e30)
    optimizer.step()
    optimizer.step()
    model[0].weight.grad._values()[0] = float("inf")
    with pytest.raises(
        NonFiniteError, match=r"got 3 elements that are nan or inf, the first in 0\.weight"
    ):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    with pytest.raises(ValueError, match="nonfinite must be 'raise', 'skip' or 'allow', got 'no'"):
        GossipDataParallel(torch.nn.Linear(2, 2), optimizer, SGP(Ring(1)), nonfinite="no")


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_device_finds_is_counted_and_not_waited_for(fused):
    """The path of GPUs, on the CPU: a zero in place of what is not finite, or ``found_inf``."""
    model, counts = build_model(), StepCounts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    steps = FiniteSteps([optimizer], "raise", counts, torch.device("cpu"))
    steps._counter = CorruptCounter(torch.device("cpu"))
    found = []
    for is_spoiled in (False, True, False):
        model(torch.ones(2, 6)).sum().backward()
        bias = model[0].bias
        before = bias.detach().clone()
        if is_spoiled:
            bias.grad[1] = float("nan")
        steps.begin()
        optimizer.step()
        steps.end()
        assert fused == torch.equal(bias, before) or not is_spoiled
        assert not hasattr(optimizer, "found_inf")
        found.append((float(counts.nonfinite), steps.num_found_late()))
        optimizer.zero_grad()
    assert found == [(0.0, 0), (1.0, 1), (0.0, 0)]
    assert flat(model).isfinite().all()


class Launches(TorchDispatchMode):
    """Counts ops, each of which is a launch on a GPU."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_on_a_device_few_launches_check_gradients_however_many():
    like = {"dtype": torch.bfloat16, "device": "meta"}
    parameters = [nn.Parameter(torch.empty(3, **like)) for _ in range(148)]
    for parameter in parameters:
        parameter.grad = torch.empty(3, **like)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    steps = FiniteSteps([optimizer], "raise", StepCounts(), torch.device("meta"))
    with Launches() as launches:
        steps.begin()
    assert launches.ops["pyparallel.clear_nonfinite_.default"] == 1
    assert launches.ops.total() <= 12, launches.ops


@pytest.mark.parametrize("on_device", [False, True])
def test_several_optimizers_are_checked_together(on_device):
    """Also if one is stepped by a scaler before another that is not."""
    model, counts = build_model(), StepCounts()
    weight, bias, *_ = model.parameters()
    sgd = torch.optim.SGD([weight], lr=0.1)
    adamw = torch.optim.AdamW([bias], lr=0.1, fused=True)
    steps = FiniteSteps([sgd, adamw], "raise", counts, torch.device("cpu"))
    if on_device:
        steps._counter = CorruptCounter(torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    stepped = []
    for spoiled, scales in [(None, False), (weight, False), (bias, False), (bias, True)]:
        for parameter in (weight, bias):
            parameter.grad = torch.ones_like(parameter)
        if spoiled is not None:
            spoiled.grad.view(-1)[0] = float("nan")
        before = weight.detach().clone(), bias.detach().clone()
        scaler.scale(torch.zeros(1))
        for index, optimizer in enumerate((sgd, adamw)):
            hook = optimizer.register_step_pre_hook(lambda *_, i=index: steps.begin(i, i == 0))
            (scaler.step if scales and index == 0 else type(optimizer).step)(optimizer)
            hook.remove()
            steps.end()
        if scales:
            scaler.update()
        after = weight, bias
        stepped.append([not torch.equal(a, b) for a, b in zip(after, before, strict=True)])
        assert float(counts.nonfinite) == (spoiled is not None)
    # On a device a parameter of an optimizer without found_inf is stepped with 0 in such places.
    assert stepped == [[True, True], [on_device, False], [on_device, False], [True, False]]
    assert weight.isfinite().all()
    assert bias.isfinite().all()
