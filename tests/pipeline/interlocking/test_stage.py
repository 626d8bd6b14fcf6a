"""One stage: gradients in, gradients out, and what learns from which."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline.interlocking.stage import HeadRuntime, InterlockingStage
from pyparallel.pipeline.runtime.loss import Criterion
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter
from pyparallel.pipeline.runtime.stage_weights import LiveWeights


class Twice(nn.Module):
    """Hands on two tensors that learn, and one that does not."""

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
    at_work = HeadRuntime(head, criterion, reads_shared=False)
    return InterlockingStage(1, module, optimizer, LiveWeights(None), None, at_work)


FEED = MicrobatchSplitter(None, torch.ones(5, 2, dtype=torch.float64), 0, 1)


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return torch.randn(5, 3, dtype=torch.float64, requires_grad=True)


def gradients(count):
    torch.manual_seed(2)
    return [tuple(torch.randn(5, n, dtype=torch.float64) for n in (2, 4)) for _ in range(count)]


def test_a_head_learns_from_its_loss_and_the_stage_does_not(inputs):
    stage = build()
    left, _, right = stage.forward(0, inputs, FEED)
    found = stage.head_backward(0, None, FEED)
    loss = mse_loss(stage.head.module((left, None, right)), FEED.target(0))
    head = list(stage.head.module.parameters())
    *wanted, of_left, of_right = torch.autograd.grad(loss, [*head, left, right])
    torch.testing.assert_close([p.grad for p in head], wanted)
    torch.testing.assert_close(found, (of_left, of_right))
    assert all(p.grad is None for p in stage.module.parameters())


def test_what_a_head_does_not_read_has_a_gradient_of_zeros(inputs):
    class Left(nn.Module):
        def forward(self, value):
            return value[0]

    stage = build(Left())
    stage.forward(0, inputs, FEED)
    left, right = stage.head_backward(0, None, FEED)
    assert left.abs().sum() > 0
    assert torch.equal(right, torch.zeros(5, 4, dtype=torch.float64))


def test_gradients_go_through_together_as_one_by_one(inputs):
    stage = build()
    stage.forward(0, inputs, FEED)
    arrived = gradients(3)
    together = stage.input_vjp(0, arrived)
    alone = [stage.input_vjp(0, [each])[0] for each in arrived]
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for p in stage.module.parameters())
    assert inputs.grad is None


def test_learning_forgets_the_microbatch_and_leaves_the_inputs_alone(inputs):
    stage = build()
    outputs = stage.forward(0, inputs, FEED)
    (arrived,) = gradients(1)
    parameters = list(stage.module.parameters())
    wanted = torch.autograd.grad(outputs[::2], parameters, arrived, retain_graph=True)
    stage.learn(0, arrived)
    torch.testing.assert_close([p.grad for p in parameters], list(wanted))
    assert inputs.grad is None
    with pytest.raises(KeyError):
        stage.learn(0, arrived)


def test_both_in_one_pass_are_both(inputs):
    apart, joint = build(), build()
    (arrived,) = gradients(1)
    for stage in (apart, joint):
        stage.forward(0, inputs, FEED)
    (wanted,) = apart.input_vjp(0, [arrived])
    apart.learn(0, arrived)
    torch.testing.assert_close(joint.backward_and_input_vjp(0, arrived), wanted)
    for a, b in zip(apart.module.parameters(), joint.module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("count", [1, 3])
def test_inputs_that_nothing_depends_on_have_gradients_of_zeros(count):
    module = nn.Embedding(4, 3)  # its inputs are tokens: they have none
    stage = InterlockingStage(0, module, None, LiveWeights(None), None, None)
    stage.forward(0, torch.tensor([1, 2]), FEED)
    assert stage.input_vjp(0, [(torch.ones(2, 3),)] * count) == [()] * count


def test_a_state_goes_from_stage_to_stage(inputs):
    first, second = build(), build()
    first.forward(0, inputs, FEED)
    first.head_backward(0, None, FEED)
    first.learn(0, gradients(1)[0])
    first.update()
    assert first.head_loss > 0
    second.load_state_dict(first.state_dict())
    for mine, theirs in ((first.module, second.module), (first.head.module, second.head.module)):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
