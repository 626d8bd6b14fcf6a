"""A model of tokens, its loss by token, and batches of samples with different numbers of them."""

from functools import partial

import torch
from torch import nn

from pyparallel.pipeline import PipelineTrainer

sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


VOCAB, WIDTH, NUM_MICROBATCHES = 11, 6, 3
IGNORED = -100
SIZES = [(7, 5), (3, 9), (5, 4)]  # samples and tokens of each batch


class Embed(nn.Module):
    """A first layer of several arguments, which checks one of them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def find_input_error(self, ids, mask=None, *, scale=1.0):
        if mask is not None and mask.shape != ids.shape:
            return f"mask must be of the shape of ids, {list(ids.shape)}, got {list(mask.shape)}"
        return None

    def forward(self, ids, mask=None, *, scale=1.0):
        value = scale * self.table(ids)
        return value if mask is None else value * mask[..., None]


def build_layers(first=Embed):
    torch.manual_seed(4)
    layers = [first(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(
        WIDTH), nn.Linear(WIDTH, VOCAB)]  # fmt: skip
    return [layer.double() for layer in layers]


SPLITS = {2: [3], 4: [1, 3, 4]}  # by the number of stages


def cross_entropy(output, target):
    """Return the mean over the tokens of a microbatch."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def count_tokens(target):
    return (target != IGNORED).sum()


def build(schedule, num_stages=2, layers=None, **options):
    options = {"loss_weight_fn": count_tokens, "loss_fn": cross_entropy, **options}
    return PipelineTrainer(
        build_layers() if layers is None else layers, options.pop("loss_fn"), sgd, schedule,
        num_microbatches=NUM_MICROBATCHES, split=SPLITS[num_stages], **options,
    )  # fmt: skip


def draw_batches():
    """Return ids, mask and target of each batch; samples differ in their number of tokens."""
    generator = torch.Generator().manual_seed(8)
    for samples, tokens in SIZES:
        ids = torch.randint(0, VOCAB, (samples, tokens), generator=generator)
        target = torch.randint(0, VOCAB, (samples, tokens), generator=generator)
        lengths = torch.randint(1, tokens + 1, (samples,), generator=generator)
        mask = torch.arange(tokens) < lengths[:, None]
        yield ids, mask, target.masked_fill(~mask, IGNORED)


def parameters_of(trainer):
    return {
        name: each.detach().clone()
        for stage in trainer.stages
        for name, each in stage.module.named_parameters()
    }


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
