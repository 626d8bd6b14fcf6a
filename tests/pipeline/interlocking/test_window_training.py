"""Stages learn from the losses that the paper gives each window (arXiv 2010.04116)."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from pyparallel.pipeline import Farthest, Interlocking, LinearHead, Mean, PipelineTrainer, Sum


def gold(window, losses, num_stages):
    """Train multipliers 2, 3, 4, 5 of ones on a cross entropy, the last on a tenth of the sum."""

    class Multiplier(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), float(factor)))

        def forward(self, value):
            return value * self.weight

    layers = [Multiplier(2 + stage) for stage in range(num_stages)]
    trainer = PipelineTrainer(
        layers,
        lambda output, target: 0.1 * output.sum(),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        Interlocking(
            window, [nn.Identity() for _ in layers[1:]], losses, head_loss_fn=cross_entropy
        ),
        num_microbatches=1,
        split=range(1, num_stages),
    )
    trainer.step(torch.ones(1, 2), torch.tensor([1]))
    return [layer.weight.tolist() for layer in layers]


AUTHORS_EXAMPLES = [
    (3, Farthest(), [[0.8, 0.8], [2.2, 2.2], [3.4, 3.4]]),
    (1, Farthest(), [[1.5, 2.5], [2.0, 4.0], [3.4, 3.4]]),
    (2, Farthest(), [[0.5, 3.5], [2.2, 2.2], [3.4, 3.4]]),
    (2, Sum(), [[0.0, 4.0], [1.2, 3.2], [3.4, 3.4]]),
    (2, Mean(), [[1.0, 3.0], [2.1, 3.1], [3.4, 3.4]]),
    (3, Farthest(), [[-4.0, 8.0], [-1.0, -1.0], [1.0, 1.0], [2.6, 2.6]]),
]


def test_the_authors_examples(subtests):
    for window, losses, weights in AUTHORS_EXAMPLES:
        with subtests.test(window=window, losses=losses, weights=weights):
            found = gold(window, losses, len(weights))
            torch.testing.assert_close(torch.tensor(found), torch.tensor(weights))


class Masked(nn.Module):
    """A layer between others that pass a mask on: it returns both but as the last one."""

    def __init__(self, is_last):
        super().__init__()
        self.linear, self.is_last = nn.Linear(4, 4), is_last

    def forward(self, value, mask=None):
        value, mask = value if isinstance(value, tuple) else (value, mask)
        value = self.linear(value) * mask[..., None]
        return value if self.is_last else (value, mask)


def test_a_head_takes_the_first_tensor_beside_a_mask():
    torch.manual_seed(0)
    layers = [Masked(False), Masked(True)]
    plain = copy.deepcopy(layers)
    x, mask, target = torch.randn(6, 3, 4), torch.rand(6, 3) < 0.7, torch.randn(6, 3, 4)
    trainer = PipelineTrainer(
        layers, mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        Interlocking(1, LinearHead(4)), num_microbatches=2, split=[1],
    )  # fmt: skip
    trainer.prepare(x, mask, target=target)
    head = copy.deepcopy(trainer.stages[0].head.module.module)
    optimizer = torch.optim.SGD(nn.Sequential(*plain, head).parameters(), lr=0.1)
    for _ in range(3):
        trainer.step(x, mask, target=target)
        hidden, _ = plain[0](x, mask)
        (mse_loss(head(hidden), target)).backward()
        mse_loss(plain[1]((hidden.detach(), mask)), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer.flush()
    found, wanted = (nn.Sequential(*each).state_dict() for each in (layers, plain))
    torch.testing.assert_close(found, wanted)
