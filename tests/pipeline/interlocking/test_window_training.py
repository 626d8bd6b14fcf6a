"""Stages learn from the losses that the paper gives each window (arXiv 2010.04116)."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pyparallel.pipeline import Farthest, Interlocking, Mean, PipelineTrainer, Sum


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
