"""The hook of compiled DDP on two ranks."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel.compression import Cast, ErrorFeedback, Int8, TopK, compress_ddp
from pyparallel.compression.hooks.ddp_compiled import CustomOp, StepDetector
from tests.cases import slow
from tests.compression.hooks.steps import average, batches
from tests.workers import assert_equal_on_all_ranks, call_each, run_ranks

COMPRESSORS = [  # and the largest error of a step, relative to the norm of its gradients
    (Cast(), 4e-3),
    (Int8(), 2e-2),
    (ErrorFeedback(Int8()), 4e-2),
    (ErrorFeedback(TopK(0.1)), 1.0),
    (TopK(1.0), 1e-6),
]
SHAPE = 4, 20  # of a batch
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


def flat_gradients(model):
    """Concatenate gradients in memory order, as buckets do."""
    return torch.cat(
        [model.turned.grad.t().flatten(), *(p.grad.flatten() for p in model.first.parameters())]
    )


def flat_residual(state):
    saved = state.state_dict()["parameters"]
    used = ("turned", "first.weight", "first.bias")
    return torch.cat([saved[name]["residual"].flatten() for name in used])


def wrap(compressor, **options):
    """Wrap in a compressed DDP with the current configuration."""
    ddp = DistributedDataParallel(build(), **options)
    state = compress_ddp(ddp, compressor)
    return ddp, state


def training(ddp, compiled=None):
    """Return forward and backward, of which "forward" alone or the whole "step" is compiled."""
    forward = torch.compile(ddp, backend="aot_eager") if compiled == "forward" else ddp

    def step(batch):
        forward(batch).square().mean().backward()

    return torch.compile(step, backend="aot_eager") if compiled == "step" else step


def true_gradients(*given):
    model = build()
    for batch in given:
        model(batch).square().mean().backward()
    return average(flat_gradients(model))


def compare_with_truth(rank, form):
    cases, config, compiled, options = FORMS[form]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(config):
        for compressor, error in cases:
            ddp, state = wrap(compressor, **options)
            step = training(ddp, compiled)
            expected, payloads = 0.0, set()
            for batch in batches(rank, 3, *SHAPE):
                truth = true_gradients(batch)
                ddp.zero_grad()
                step(batch)
                got = flat_gradients(ddp.module)
                assert (got - truth).norm() < error * truth.norm(), compressor
                expected = expected + truth - got
                if isinstance(compressor, ErrorFeedback):  # the residuals hold the error
                    left = expected - average(flat_residual(state))
                    assert left.norm() < 1e-5 * truth.norm(), compressor
                payloads.add(state.last_step.payload_bytes)
            assert len(payloads) == 1, compressor  # each step is counted separately
            assert min(payloads) > 0, compressor
            assert_equal_on_all_ranks(got.tolist())
        if compiled:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    is_traced = bool(torch._dynamo.utils.counters["compiled_autograd"].get("captures"))
    assert is_traced == (config is TRACED)


BUCKETS = {"find_unused_parameters": True}
FORMS = {  # by name: compressors, configuration, what is compiled, DDP's options
    "buckets of a compiled forward": (COMPRESSORS[3:4], {"optimize_ddp": True}, "forward", BUCKETS),
    "buckets of a compiled step": (COMPRESSORS[3:4], {"optimize_ddp": True}, "step", BUCKETS),
    "one by one": (COMPRESSORS, ONE_BY_ONE, None, {}),
    "one by one, in a graph": (COMPRESSORS[3:4], TRACED, "step", {}),
}


def accumulate(rank, config, compiled=None):
    first, second = batches(rank, 2, *SHAPE)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(config):
        ddp, state = wrap(Cast())
        step = training(ddp, compiled)
        with ddp.no_sync():
            step(first)
        assert state.last_step.payload_bytes == 0
        alone = flat_gradients(ddp.module)
        assert not torch.equal(alone, average(alone))
        step(second)
    truth = true_gradients(first, second)
    assert (flat_gradients(ddp.module) - truth).norm() < 4e-3 * truth.norm()


def change_of_form(rank):
    """Resume the residuals of buckets with gradients averaged one by one."""
    first, second = batches(rank, 2, *SHAPE)
    ddp, state = wrap(ErrorFeedback(TopK(0.1)), find_unused_parameters=True)
    training(ddp)(first)
    expected = true_gradients(first) - flat_gradients(ddp.module)
    saved = copy.deepcopy(state.state_dict())
    with torch._dynamo.config.patch(ONE_BY_ONE):
        ddp, state = wrap(ErrorFeedback(TopK(0.1)))
        state.load_state_dict(saved)
        training(ddp)(second)
    expected += true_gradients(second) - flat_gradients(ddp.module)
    torch.testing.assert_close(average(flat_residual(state)), expected)
    assert expected.norm() > 0


def traced_cases(rank):
    compare_with_truth(rank, "one by one, in a graph")
    accumulate(rank, TRACED, "step")


# In a compiled step Dynamo traces the hook's functions too, which takes long.
@pytest.mark.parametrize(
    "form",
    ["buckets of a compiled forward", slow("buckets of a compiled step"), "one by one"],
)
def test_gradients_are_means_over_ranks(ranks, form):
    ranks.run(2, compare_with_truth, form)


@pytest.mark.slow  # it compiles
def test_a_graph_of_forward_and_backward():
    run_ranks(2, traced_cases)  # compiled autograd stays on in a process


def test_no_sync_sends_nothing_and_residuals_survive_a_change_of_form(ranks):
    ranks.run(2, call_each, [(accumulate, ONE_BY_ONE), (change_of_form,)])


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
