"""The hook of compiled DDP: two ranks run many cases, and the tests check what they found."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel.compression import Cast, ErrorFeedback, Int8, TopK, ddp_hook
from pyparallel.compression.hooks.ddp_compiled import CustomOp, StepDetector
from tests.workers import run_ranks

COMPRESSORS = {  # by name: maximum error of a step, relative to the norm of its gradients
    "Cast": (Cast(), 4e-3),
    "Int8": (Int8(), 2e-2),
    "ErrorFeedback(Int8)": (ErrorFeedback(Int8()), 4e-2),
    "ErrorFeedback(TopK)": (ErrorFeedback(TopK(0.1)), 1.0),
    "TopK of all": (TopK(1.0), 1e-6),
}
COMPILED = {"Int8": COMPRESSORS["Int8"], "ErrorFeedback(TopK)": COMPRESSORS["ErrorFeedback(TopK)"]}
ONE_BY_ONE = {"optimize_ddp": "python_reducer"}
TRACED = {
    **ONE_BY_ONE,
    "compiled_autograd": True,
    "compiled_autograd_kwargs_override": {"fullgraph": True},
}


class Net(nn.Module):
    """A model with a gradient that is not contiguous, and a parameter without one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 40)
        self.turned = nn.Parameter(torch.randn(30, 40).t())
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return torch.relu(self.first(x)) @ self.turned


def build():
    torch.manual_seed(0)
    return Net()


def batches(rank, count):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 20, generator=generator) for _ in range(count)]


def flat_gradients(model):
    """Concatenate gradients in memory order, as buckets do."""
    return torch.cat(
        [model.turned.grad.t().flatten(), *(p.grad.flatten() for p in model.first.parameters())]
    )


def average(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def flat_residual(state):
    saved = state.state_dict()["parameters"]
    used = ("turned", "first.weight", "first.bias")
    return torch.cat([saved[name]["residual"].flatten() for name in used])


def wrap(compressor, **options):
    """Wrap in a compressed DDP with the current configuration."""
    ddp = DistributedDataParallel(build(), **options)
    state, hook = ddp_hook(compressor, ddp)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def training(ddp, *, compiled):
    """Return forward and backward; both inside of the compiled function, if compiled."""

    def step(batch):
        ddp(batch).square().mean().backward()

    return torch.compile(step, backend="aot_eager") if compiled else step


def true_gradients(*given):
    model = build()
    for batch in given:
        model(batch).square().mean().backward()
    return average(flat_gradients(model))


def compare_with_truth(rank, cases, config, compiled, options):
    found = {}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(config):
        for case, (compressor, _) in cases.items():
            ddp, state = wrap(compressor, **options)
            step = training(ddp, compiled=compiled)
            errors, residual_errors, expected, payloads = [], [], 0.0, set()
            for batch in batches(rank, 3):
                truth = true_gradients(batch)
                ddp.zero_grad()
                step(batch)
                got = flat_gradients(ddp.module)
                errors.append(float((got - truth).norm() / truth.norm()))
                expected = expected + truth - got
                if isinstance(compressor, ErrorFeedback):
                    left = expected - average(flat_residual(state))
                    residual_errors.append(float(left.norm() / truth.norm()))
                payloads.add(state.last_step.payload_bytes)
            found[case] = max(errors), max(residual_errors, default=0.0), payloads, got.tolist()
        if compiled:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return found, dict(torch._dynamo.utils.counters["compiled_autograd"])


FORMS = {  # by name: compressors, configuration, whether compiled, DDP's options, whether traced
    "one by one": (COMPRESSORS, ONE_BY_ONE, False, {}, False),
    "buckets of a compiled forward": (
        {"ErrorFeedback(TopK)": COMPRESSORS["ErrorFeedback(TopK)"]},
        {"optimize_ddp": True},
        True,
        {"find_unused_parameters": True},
        False,
    ),
    "one by one, in a graph": (COMPILED, TRACED, True, {}, True),
}


def accumulate(rank, config, compiled):
    first, second = batches(rank, 2)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(config):
        ddp, state = wrap(Cast())
        step = training(ddp, compiled=compiled)
        with ddp.no_sync():
            step(first)
        silent = state.last_step.payload_bytes
        alone = flat_gradients(ddp.module)
        shared = bool(torch.equal(alone, average(alone)))
        step(second)
    truth = true_gradients(first, second)
    return silent, shared, float((flat_gradients(ddp.module) - truth).norm() / truth.norm())


def change_of_form(rank):
    """Resume the residuals of buckets with gradients averaged one by one."""
    first, second = batches(rank, 2)
    ddp, state = wrap(ErrorFeedback(TopK(0.1)), find_unused_parameters=True)
    training(ddp, compiled=False)(first)
    expected = true_gradients(first) - flat_gradients(ddp.module)
    saved = copy.deepcopy(state.state_dict())
    with torch._dynamo.config.patch(ONE_BY_ONE):
        ddp, state = wrap(ErrorFeedback(TopK(0.1)))
        state.load_state_dict(saved)
        training(ddp, compiled=False)(second)
    expected += true_gradients(second) - flat_gradients(ddp.module)
    torch.testing.assert_close(average(flat_residual(state)), expected)
    return float(expected.norm())


def untraced_cases(rank):
    names = ["buckets of a compiled forward", "one by one"]  # the compiled one must come first
    found = {name: compare_with_truth(rank, *FORMS[name][:4]) for name in names}
    found["no sync"] = accumulate(rank, ONE_BY_ONE, False)
    return found | {"change of form": change_of_form(rank)}


def traced_cases(rank):
    name = "one by one, in a graph"
    found = {name: compare_with_truth(rank, *FORMS[name][:4])}
    return found | {"no sync, in a graph": accumulate(rank, TRACED, True)}


@pytest.fixture(scope="module")
def ranks():
    """Return by case what each rank found; compiled autograd needs a process of its own."""
    found = (run_ranks(2, cases) for cases in (untraced_cases, traced_cases))
    return [untraced | traced for untraced, traced in zip(*found, strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_means_over_ranks(ranks, form):
    cases, *_, traced = FORMS[form]
    for found, counted in (rank[form] for rank in ranks):
        assert bool(counted.get("captures")) == traced
        for case, (error, residual_error, payloads, got) in found.items():
            assert error < cases[case][1], case
            assert residual_error < 1e-5, case  # the residuals hold the error
            assert len(payloads) == 1, case  # each step is counted separately
            assert min(payloads) > 0, case
            assert got == ranks[0][form][0][case][3], case


def test_no_sync_sends_nothing_and_residuals_survive_a_change_of_form(ranks):
    for rank in ranks:
        assert rank["change of form"] > 0
        for silent, shared, error in (rank["no sync"], rank["no sync, in a graph"]):
            assert silent == 0
            assert not shared
            assert error < 4e-3


def test_a_second_gradient_of_a_parameter_begins_a_step():
    detector = StepDetector()
    assert [detector.is_new_step(name) for name in ["b", "a", "b", "a", "a"]] == [1, 0, 1, 0, 1]


class Doubling:
    def double_(self, gradient, parameter):
        gradient.mul_(2)


def test_operators_live_as_long_as_their_objects():
    doubling = Doubling()
    first, second = CustomOp(doubling.double_), CustomOp(doubling.double_)
    assert first.op.name() != second.op.name()
    gradient = torch.ones(3)
    second.op(gradient, gradient)
    assert gradient.tolist() == [2, 2, 2]
    name = first.op.name()
    del first
    gc.collect()
    assert CustomOp(doubling.double_).op.name() == name
