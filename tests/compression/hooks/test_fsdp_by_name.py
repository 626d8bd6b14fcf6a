"""FSDP2 reduces the parameters that have a gradient: a compressor's state follows their names."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    compress_fsdp,
)
from pyparallel.compression.quantizers.blockwise import BlockwiseCompressor
from tests.compression.catalog import CATALOG

pytestmark = pytest.mark.slow  # a minute; the fast test is in test_fsdp_collectives.py

LAYERS = ("body", "late", "a", "b")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
SERVING = [
    each
    for row in CATALOG
    for each in row.compressors
    if each.error_at(AttachPoint.FSDP_GRADIENTS) is None
]


class Dot(nn.Module):
    """The sum of products with given tensors, which are thus the gradients, to the bit."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(7, 5)), nn.Parameter(torch.zeros(9))

    def forward(self, weight, bias):
        return (self.weight * weight).sum() + (self.bias * bias).sum()


class Layers(nn.Module):
    """Layers of the same shapes, of which a step uses some."""

    def __init__(self):
        super().__init__()
        for name in LAYERS:
            self.add_module(name, Dot())

    def forward(self, given):
        return sum(getattr(self, layer)(*pair) for layer, pair in given.items())


def build(compressor, per_layer, policy, nonfinite):
    model, options = Layers(), {"mp_policy": policy} if policy else {}
    for layer in LAYERS if per_layer else ():
        fully_shard(getattr(model, layer), **options)
    fully_shard(model, **options)
    return model, compress_fsdp(model, gradients=compressor, nonfinite=nonfinite)


def tree(state, path=()):
    """Yield a compressor's state and those of wrapped ones, with their places."""
    yield path, state
    for place, inner in enumerate(state.inner):
        yield from tree(inner, (*path, place))


class ByName:
    """A compressed reduce-scatter by hand, with all that a compressor keeps in a dictionary."""

    def __init__(self, compressor, name):
        self.compressor, self.name = compressor, name
        self.kept, self.step = {}, 0
        inner = getattr(compressor, "compressor", compressor)
        self.granularity = inner.granularity if isinstance(inner, BlockwiseCompressor) else None
        self.inner = inner

    def encode(self, buffers, name):
        """Encode [(key, tensor)], concatenated."""
        x = torch.cat([tensor for _, tensor in buffers])
        state = self.compressor.init(BufferLayout.flat(len(x), name), x.device, dist.get_rank())
        lengths = [len(tensor) for _, tensor in buffers]
        found = list(tree(state))
        for path, each in found:
            each.step = self.step
            for entry, flat in each.entries.items():
                for (key, _), part in zip(buffers, flat.split(lengths), strict=True):
                    part.copy_(self.kept.get((key, path, entry), torch.zeros(len(part))))
        message = self.compressor.compress(x, state)
        for path, each in tree(state):
            for entry, flat in each.entries.items():
                for (key, _), part in zip(buffers, flat.split(lengths), strict=True):
                    self.kept[key, path, entry] = part.clone()
        return message

    def reduce(self, gradients):
        """Return this rank's rows of the mean of gradients by name, flat."""
        size, rank = dist.get_world_size(), dist.get_rank()
        rows = {}
        for name, gradient in gradients.items():
            padded = torch.zeros(-(-len(gradient) // size) * size, *gradient.shape[1:])
            padded = padded.to(gradient.dtype)
            padded[: len(gradient)] = gradient
            rows[name] = padded.view(size, -1)
        parts = [[((name, i), each[i]) for name, each in rows.items()] for i in range(size)]
        numel = sum(each.shape[1] for each in rows.values())
        if self.granularity:
            short = -numel % self.granularity
            zeros = torch.zeros(short).to(gradient.dtype)
            padded = [[*part, (("padding", short, i), zeros)] for i, part in enumerate(parts)]
            message = self.encode([each for part in padded for each in part], self.name)
            sizes = self.inner.sizes(numel + short)
            pieces = [each.split(n) for each, n in zip(message, sizes, strict=True)]
            messages = list(zip(*pieces, strict=True))
            layout = BufferLayout.flat(numel + short)
        else:
            names = [f"{self.name}[{i}]" for i in range(size)]
            messages = [self.encode(p, name) for p, name in zip(parts, names, strict=True)]
            layout = BufferLayout.flat(numel, names[rank])
        self.step += 1
        everyone = [None] * size
        dist.all_gather_object(everyone, messages)
        total = torch.zeros(layout.numel)
        for each in everyone:
            self.compressor.decompress(each[rank], layout, total, accumulate=True)
        lengths = [each.shape[1] for each in rows.values()]
        mean = (total[:numel] * (1 / size)).to(gradient.dtype).float().split(lengths)
        return dict(zip(rows, mean, strict=True))


def used_at(step):
    """Return the layers of each microbatch of a step, each with gradients that are not zero."""
    body = ["body"] if 3 <= step < 6 else ["body", "late"]  # frozen, and unfrozen
    head = "ab"[step % 2]
    return [[*body, "a"], [*body, "b"]] if step == 7 else [[*body, head]]


def draw(step, microbatch, rank, layers, bad):
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    given = {}
    for layer in layers:
        given[layer] = torch.randn(7, 5, generator=generator), torch.randn(9, generator=generator)
        if layer == "b":
            given[layer] = tuple(map(torch.zeros_like, given[layer]))
    if bad:
        given["body"][0][2, 3] = float("nan")
    return given


def compare_with_states_by_name(rank, compressor, per_layer=False, policy=None, bad_step=None):
    """Compare each step's gradients, and resume between two steps."""
    nonfinite = "raise" if bad_step is None else "skip"
    model, compression = build(compressor, per_layer, policy, nonfinite)
    groups = [(each, (each,)) for each in LAYERS] if per_layer else [("", LAYERS)]
    reducers = {name: ByName(compressor, name) for name, _ in groups}
    dtype = torch.bfloat16 if policy else torch.float32
    for step in range(9):
        if step == 4:
            saved = copy.deepcopy(compression.state_dict())
            model, compression = build(compressor, per_layer, policy, nonfinite)
            compression.load_state_dict(saved)
        model.late.requires_grad_("late" in used_at(step)[0])
        model.zero_grad()
        sums, microbatches = {}, used_at(step)
        for index, layers in enumerate(microbatches):
            given = draw(step, index, rank, layers, bad=rank == 1 and step == bad_step)
            model.set_requires_gradient_sync(index == len(microbatches) - 1)
            frozen = {} if model.late.weight.requires_grad else {"late": given["body"]}
            model({**frozen, **given}).backward()
            for layer, pair in given.items():
                for key, each in zip(("weight", "bias"), pair, strict=True):
                    name = f"{layer}.{key}"
                    sums[name] = sums.get(name, 0) + each.to(dtype)
        order = [f"{layer}.{key}" for layer in LAYERS for key in ("weight", "bias")]
        for group, layers in groups:
            mine = {n: sums[n] for n in order if n in sums and n.split(".")[0] in layers}
            if not mine:
                continue
            if not all(each.isfinite().all() for each in mine.values()):
                mine = {name: torch.zeros_like(each) for name, each in mine.items()}
            for name, expected in reducers[group].reduce(mine).items():
                got = model.get_parameter(name).grad.to_local().flatten()
                assert torch.equal(got, expected[: len(got)]), (step, name)
        assert {n for n, p in model.named_parameters() if p.grad is not None} == set(sums)


CASES = {
    "one group": [(each,) for each in SERVING],
    "per layer": [(each, True) for each in SERVING[::3]],
    "16 bits": [(each, False, HALF) for each in SERVING[::3]],
    "nan": [(each, False, None, 5) for each in SERVING[1::3]],
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_state_follows_parameters_that_have_a_gradient(ranks, cases):
    ranks.run_each(2, compare_with_states_by_name, cases, time_limit=240)
