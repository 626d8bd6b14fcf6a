"""One interlocking stage: its gradients, and which losses train its head and its weights."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline.interlocking.stage import HeadRuntime, InterlockingStage
from pyparallel.pipeline.runtime.loss import Criterion
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter
from pyparallel.pipeline.runtime.stage_weights import LiveWeights


class Twice(nn.Module):
    """Returns two differentiable tensors and a mask."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 4)

    def forward(self, x):
        return self.left(x).tanh(), x > 0, self.right(x)


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, value):
        left, _, right = value
        return self.linear(left) + right[:, :2]


def build(head=None):
    torch.manual_seed(0)
    module, head = Twice().double(), (head or Joined()).double()
    criterion = Criterion(mse_loss, lambda microbatch: True)
    optimizer = torch.optim.SGD([*module.parameters(), *head.parameters()], lr=0.1)
    runtime = HeadRuntime(head, criterion, reads_shared=False)
    return InterlockingStage(1, module, [optimizer], LiveWeights(None), None, runtime)


SPLITTER = MicrobatchSplitter(None, torch.ones(5, 2, dtype=torch.float64), 0, 1)


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return torch.randn(5, 3, dtype=torch.float64, requires_grad=True)


def gradients(count):
    torch.manual_seed(2)
    return [tuple(torch.randn(5, n, dtype=torch.float64) for n in (2, 4)) for _ in range(count)]


def test_a_heads_loss_trains_the_head_and_not_the_stage(inputs):
    stage = build()
    left, _, right = stage.forward(0, inputs, SPLITTER)
    found = stage.head_backward(0, None, SPLITTER)
    loss = mse_loss(stage.head.module((left, None, right)), SPLITTER.target(0))
    head = list(stage.head.module.parameters())
    *wanted, of_left, of_right = torch.autograd.grad(loss, [*head, left, right])
    torch.testing.assert_close([p.grad for p in head], wanted)
    torch.testing.assert_close(found, (of_left, of_right))
    assert all(p.grad is None for p in stage.module.parameters())


def test_an_output_that_a_head_does_not_read_has_a_zero_gradient(inputs):
    class Left(nn.Module):
        def forward(self, value):
            return value[0]

    stage = build(Left())
    stage.forward(0, inputs, SPLITTER)
    left, right = stage.head_backward(0, None, SPLITTER)
    assert left.abs().sum() > 0
    assert torch.equal(right, torch.zeros(5, 4, dtype=torch.float64))


def test_batched_gradients_equal_those_one_by_one(inputs):
    stage = build()
    stage.forward(0, inputs, SPLITTER)
    arrived = gradients(3)
    batched = stage.input_vjp(0, arrived)
    single = [stage.input_vjp(0, [each])[0] for each in arrived]
    torch.testing.assert_close(batched, single, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for p in stage.module.parameters())
    assert inputs.grad is None


def test_accumulate_grads_releases_the_microbatch_and_leaves_the_inputs_alone(inputs):
    stage = build()
    outputs = stage.forward(0, inputs, SPLITTER)
    (arrived,) = gradients(1)
    parameters = list(stage.module.parameters())
    wanted = torch.autograd.grad(outputs[::2], parameters, arrived, retain_graph=True)
    stage.accumulate_grads(0, arrived)
    torch.testing.assert_close([p.grad for p in parameters], list(wanted))
    assert inputs.grad is None
    with pytest.raises(KeyError):
        stage.accumulate_grads(0, arrived)


def test_one_backward_equals_input_vjp_and_accumulate_grads(inputs):
    separate, joint = build(), build()
    (arrived,) = gradients(1)
    for stage in (separate, joint):
        stage.forward(0, inputs, SPLITTER)
    (wanted,) = separate.input_vjp(0, [arrived])
    separate.accumulate_grads(0, arrived)
    torch.testing.assert_close(joint.backward_and_input_vjp(0, arrived), wanted)
    for a, b in zip(separate.module.parameters(), joint.module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("count", [1, 3])
def test_inputs_without_gradients_get_none(count):
    module = nn.Embedding(4, 3)  # its inputs are tokens, which have no gradients
    stage = InterlockingStage(0, module, [], LiveWeights(None), None, None)
    stage.forward(0, torch.tensor([1, 2]), SPLITTER)
    assert stage.input_vjp(0, [(torch.ones(2, 3),)] * count) == [()] * count


def test_a_state_is_loaded_into_another_stage(inputs):
    first, second = build(), build()
    first.forward(0, inputs, SPLITTER)
    first.head_backward(0, None, SPLITTER)
    first.accumulate_grads(0, gradients(1)[0])
    first.update()
    assert first.head_loss > 0
    second.load_state_dict(first.state_dict())
    for left, right in ((first.module, second.module), (first.head.module, second.head.module)):
        for a, b in zip(left.parameters(), right.parameters(), strict=True):
            assert torch.equal(a, b)
