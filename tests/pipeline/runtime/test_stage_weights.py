import pytest
import torch
from torch import nn

from pyparallel.pipeline import Delayed, Live, Predicted, Stashed
from pyparallel.pipeline.runtime.stage_weights import StageWeights
from pyparallel.training import FlatBuckets


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 1), 1.0))

    def forward(self, x):
        return x @ self.weight


class Scale(nn.Module):
    """Multiplies by a parameter, which autograd saves itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.0))

    def forward(self, x):
        return x * self.weight


class Normed(nn.Module):
    """LayerNorm of x and -x: the gradient of its input is a multiple of its weight."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2, bias=False)

    def forward(self, x):
        return self.norm(torch.cat([x, -0.5 * x * x], dim=1))[:, :1]


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 1, bias=False)

    def forward(self, x):
        return self.convolution(x[..., None])[..., 0]


LAYERS = {
    "linear": lambda: nn.Linear(1, 1, bias=False),
    "x @ w": Matrix,
    "x * w": Scale,
    "layer norm": Normed,
    "convolution": Convolved,
}


class AddOne:
    """An optimizer that adds 1 to all weights, so that version v of a weight is 1 + v."""

    def __init__(self, weights):
        self._buffers = [buffer for each in weights for buffer in each.buffers]

    def step(self, horizon=0, out=(), delayed=True):
        for buffer in self._buffers:
            buffer.add_(1)
        if horizon:
            self.predict(horizon, out)

    def predict(self, horizon, out):
        for buffer, into in zip(self._buffers, out, strict=True):
            into.copy_(buffer + horizon)


def build(layer, policy, update_index=lambda microbatch: microbatch):
    parameters = list(layer.parameters())
    for parameter in parameters:
        nn.init.ones_(parameter)
    flat = [FlatBuckets(parameters, 1 << 30)]
    return StageWeights(flat, AddOne(flat), policy, stage=0, update_index=update_index)


def gradient(layer, weight):
    """Return the input gradient and the output at 2, with both passes on this weight."""
    for parameter in layer.parameters():
        nn.init.constant_(parameter, weight)
    x = torch.full((1, 1), 2.0, requires_grad=True)
    output = layer(x)
    return torch.autograd.grad(output.sum(), x)[0].item(), output.item()


POLICIES = [
    (Live(), [1, 1, 1, 2], [1, 2, 3, 4]),
    (Stashed(Live()), [1, 1, 1, 2], [1, 1, 1, 2]),
    (Predicted(), [1, 2, 3, 4], [1, 2, 3, 4]),
    (Stashed(Predicted()), [1, 2, 3, 4], [1, 2, 3, 4]),
    (Stashed(Delayed(2)), [1, 1, 1, 2], [1, 1, 1, 2]),
]


def assert_reads(build_layer, policy, read_forward, read_backward):
    """Run three forwards, then a backward and an update in turn, and a fourth forward."""
    layer = build_layer()
    weights = build(layer, policy)
    in_flight, forward, backward = {}, [], []

    def run_forward(microbatch):
        x = torch.full((1, 1), 2.0, requires_grad=True)
        with weights.forward(microbatch):
            in_flight[microbatch] = x, layer(x)
        forward.append(in_flight[microbatch][1].item())

    for microbatch in range(3):
        run_forward(microbatch)
    for microbatch in range(4):
        x, output = in_flight.pop(microbatch)
        with weights.backward(microbatch):
            output.sum().backward()
        weights.end_backward(microbatch)
        backward.append(x.grad.item())
        weights.update()
        if microbatch == 0:
            run_forward(3)
    other = build_layer()
    assert forward == [gradient(other, weight)[1] for weight in read_forward]
    assert backward == pytest.approx([gradient(other, weight)[0] for weight in read_backward])


def test_every_operation_reads_the_version_of_its_policy(subtests):
    for kind, build_layer in LAYERS.items():
        for policy, read_forward, read_backward in POLICIES:
            with subtests.test(kind=kind, policy=policy):
                assert_reads(build_layer, policy, read_forward, read_backward)


COPIES = [(Live(), 1), (Stashed(Live()), 4), (Predicted(), 2), (Stashed(Delayed(3)), 4)]


def test_no_more_copies_than_the_policy_needs(subtests):
    for policy, copies in COPIES:
        with subtests.test(policy=policy, copies=copies):
            layer = LAYERS["linear"]()
            weights = build(layer, policy)
            in_flight = {}
            for microbatch in range(20):
                with weights.forward(microbatch):
                    in_flight[microbatch] = layer(torch.ones(1, 1))
                if microbatch >= 3:
                    with weights.backward(microbatch - 3):
                        in_flight.pop(microbatch - 3).sum().backward()
                    weights.end_backward(microbatch - 3)
                    weights.update()
            assert weights.peak_copies == copies


def test_live_weights_and_gradients_keep_their_memory():
    layer = LAYERS["linear"]()
    weights = build(layer, Predicted())
    address, before = layer.weight.data_ptr(), layer.weight.detach().clone()
    for microbatch in range(2):
        with weights.forward(microbatch) as version:
            layer(torch.ones(1, 1)).sum()
        assert version.horizon == microbatch
    assert layer.weight.data_ptr() == address
    assert torch.equal(layer.weight, before)
    with weights.backward(0):
        layer(torch.ones(1, 1)).sum().backward()
    assert layer.weight.grad.item() == 1


def test_parameters_point_to_live_weights_after_an_error():
    layer = LAYERS["linear"]()
    weights = build(layer, Predicted())
    address = layer.weight.data_ptr()
    with weights.forward(0):
        pass
    with pytest.raises(ZeroDivisionError), weights.forward(1):
        1 / (layer.weight.data_ptr() == address)
    assert layer.weight.data_ptr() == address


def test_restarting_with_microbatches_in_flight_is_refused():
    layer = LAYERS["linear"]()
    weights = build(layer, Stashed(Live()))
    with weights.forward(0):
        layer(torch.ones(1, 1))
    with pytest.raises(RuntimeError, match=r"microbatches \[0\] are still in the pipeline"):
        weights.restart(Live())
