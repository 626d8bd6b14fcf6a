"""The hook of DDP in all that DDP can do: beside plain DDP, and with nothing lost on the way."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pyparallel.compression import (
    DGC,
    Cast,
    ChunkTopK,
    ConvAutoEncoder,
    ErrorFeedback,
    Int8,
    Learned,
    PerParameter,
    Switch,
    Threshold,
    TopK,
    compress_ddp,
)
from tests.cases import slow
from tests.compression.catalog import CATALOG
from tests.compression.hooks.steps import average

SMALL = {"bucket_cap_mb": 1e-4}  # MiB
VIEW = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
LOSSLESS = [
    ErrorFeedback(TopK(1.0)),
    Threshold(1e-30),
    DGC(1.0, momentum=0.0),
    PerParameter({"*.bias": TopK(1.0), "*": ErrorFeedback(ChunkTopK(4096))}),
    Switch({0: ErrorFeedback(TopK(1.0)), 2: TopK(1.0)}),
]


class Heads(nn.Module):
    """A body, and heads of which a step uses one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body, self.a, self.b = (
            nn.Linear(*sizes, dtype=dtype) for sizes in ((6, 8), (8, 6), (8, 6))
        )

    def forward(self, x, head="a"):
        return getattr(self, head)(torch.tanh(self.body(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 10, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.table(x[:, 0].long() % 10))))


class Recomputed(nn.Module):
    """Layers that are recomputed in backward, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


class Odd(nn.Module):
    """A number, an empty parameter, a transposed one, one of 16 bits and one of four dimensions."""

    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(6, 8).t())
        self.narrow = nn.Parameter(torch.randn(6, 6).bfloat16())
        self.convolution = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        y = torch.tanh(x @ self.narrow.float()) @ self.transposed.t() * self.scale
        return self.convolution(y.view(-1, 1, 2, 4)) + self.empty.sum()


def draw(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, step, rank, **options):
    return model(draw(step, rank), **options).float().square().mean()


def by_turns(model, step, rank):
    return loss_of(model, step, rank, head="ab"[step % 2])


def on_one_rank(model, step, rank):
    return loss_of(model, step, rank, head="ab"[rank])


def on_another_rank(model, step, rank):
    return loss_of(model, step, rank, head="ab"[(step + rank) % 2])


def in_16_bits(model, step, rank):
    return model(draw(step, rank).bfloat16()).float().square().mean()


def two_forwards(model, step, rank):
    return loss_of(model, step, rank) + loss_of(model, step + 9, rank)


def with_penalty(model, step, rank):
    x = draw(step, rank).requires_grad_()
    (gradient,) = torch.autograd.grad(model.module(x).sum(), x, create_graph=True)
    return loss_of(model, step, rank) + gradient.square().mean()


def steps(loss=loss_of, *, set_to_none=True, accumulates=False, backward=torch.Tensor.backward):
    """Return training that yields all gradients of each step."""

    def train(rank, ddp, optimizer):
        for step in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            if accumulates:
                with ddp.no_sync():
                    loss(ddp, step + 50, rank).backward()
            backward(loss(ddp, step, rank))
            yield from gradients_of(ddp)
            optimizer.step()

    return train


def gradients_of(ddp):
    for parameter in ddp.parameters():
        yield torch.ones(1) if parameter.grad is None else parameter.grad.clone().flatten().float()


def in_a_thread(loss):
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


def joined(rank, ddp, optimizer):
    with ddp.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(ddp, step, rank).backward()
            optimizer.step()
    yield from steps()(rank, ddp, optimizer)


def scaled(rank, ddp, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(ddp, step, rank) * (float("inf") if (step, rank) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield torch.tensor([scaler.get_scale()])


def frozen():
    model = Heads()
    model.body.requires_grad_(False)
    return model


def ignoring():
    model = Heads()
    names = ["b.weight", "b.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))


def in_16_bit_heads():
    return Heads(torch.bfloat16)


USES = {  # model, training, DDP's options
    "a head by turns": (Heads, steps(by_turns), UNUSED),
    "no gradient on one rank": (Heads, steps(on_one_rank), UNUSED),
    "on another rank each step": (Heads, steps(on_another_rank), UNUSED | SMALL | VIEW),
    "gradients of zeros": (Heads, steps(by_turns, set_to_none=False), UNUSED),
    "unused, accumulated": (Heads, steps(by_turns, accumulates=True), UNUSED),
    "accumulated views": (mlp, steps(accumulates=True, set_to_none=False), VIEW),
    "static graph": (Recomputed, steps(), STATIC | SMALL | VIEW),
    "static graph, unused": (Heads, steps(), STATIC),
    "static graph, two forwards": (mlp, steps(two_forwards), STATIC),
    "recomputed": (Recomputed, steps(), SMALL),
    "16 bits": (in_16_bit_heads, steps(in_16_bits), UNUSED),
    "frozen first layers": (frozen, steps(), UNUSED),
    "tied": (Tied, steps(), {}),
    "odd parameters": (Odd, steps(), SMALL),
    "odd parameters, views": (Odd, steps(), VIEW),
    "ignored parameters": (ignoring, steps(), {}),
    "two forwards": (mlp, steps(two_forwards), {}),
    "backward twice": (mlp, steps(backward=twice), {}),
    "backward in a thread": (mlp, steps(backward=in_a_thread), {}),
    "gradient penalty": (mlp, steps(with_penalty), {}),
    "join": (mlp, joined, SMALL | VIEW),
    "join, unused": (Heads, joined, UNUSED),
    "scaler": (mlp, scaled, {}),
}


def beside_plain_ddp(rank, use):
    make, train, options = USES[use]
    found = []
    for compressor in (None, *LOSSLESS):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(make(), **options)
        if compressor is not None:
            policy = "allow" if use == "scaler" else "raise"
            compress_ddp(ddp, compressor, nonfinite=policy)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        gradients = list(train(rank, ddp, optimizer))
        weights = [parameter.detach().flatten().float() for parameter in ddp.parameters()]
        found.append(torch.cat([*gradients, *weights]))
        assert found[-1].isfinite().all()
        torch.testing.assert_close(found[-1], found[0], rtol=2e-6, atol=2e-6)


FEEDING_BACK = [
    *(each for row in CATALOG for each in row.compressors if each.feeds_back and row.feeds_back),
    DGC(0.05, momentum=0.0),
    PerParameter({"a.*": ErrorFeedback(Int8()), "*": ErrorFeedback(TopK(0.1))}),
    Switch({0: ErrorFeedback(TopK(0.1)), 3: ErrorFeedback(Cast())}),
    ErrorFeedback(
        Learned(
            0.5,
            dense_steps=1,
            learning_steps=3,
            innovation=0.1,
            auto_encoder=ConvAutoEncoder(channels=(2,), code_channels=1),
        )
    ),
]
PHASES = {  # options of DDP and whether the body is frozen, of runs of which each resumes the last
    "loaded": [({}, False), ({}, False)],
    "other buckets": [(SMALL, False), ({}, False), (SMALL | VIEW, False)],
    "frozen": [({}, False), (SMALL, True), ({}, False)],
    "static graph": [(STATIC, False), (STATIC | SMALL | VIEW, False)],
    "accumulated": [({}, False), (VIEW, False)],
}


def lose_nothing(rank, compressor, way):
    """Check that the means and the residuals add up to the means of plain DDP."""
    missing, saved = {}, None
    for options, is_frozen in PHASES[way]:
        torch.manual_seed(0)
        dense = mlp()
        dense[0].requires_grad_(not is_frozen)
        models = [DistributedDataParallel(copy.deepcopy(dense), **options) for _ in range(2)]
        state = compress_ddp(models[1], compressor)
        if saved is not None:
            state.load_state_dict(saved)
        for step in range(3):
            for sign, ddp in zip((1, -1), models, strict=True):
                ddp.zero_grad()
                if way == "accumulated" and step == 1:
                    with ddp.no_sync():
                        loss_of(ddp, step + 50, rank).backward()
                loss_of(ddp, step, rank).backward()
                for name, each in ddp.module.named_parameters():
                    if each.grad is not None:
                        missing[name] = missing.get(name, 0) + sign * each.grad
        saved = copy.deepcopy(state.state_dict())
    for name, tensors in saved["parameters"].items():
        left = [each for key, each in tensors.items() if key.rpartition(".")[2] == "residual"]
        mean = average(sum(left))
        torch.testing.assert_close(mean, missing[name], rtol=1e-4, atol=1e-5)


FAST_WAYS = [(ErrorFeedback(TopK(0.05)), "frozen"), (FEEDING_BACK[-2], "other buckets")]


@pytest.mark.slow
def test_lossless_hooks_train_as_plain_ddp(ranks):
    ranks.run_each(2, beside_plain_ddp, [(each,) for each in USES], time_limit=240)


@pytest.mark.parametrize(
    "rows",
    [FAST_WAYS, *(slow([(each, way) for each in FEEDING_BACK]) for way in PHASES)],
    ids=["fast", *PHASES],
)
def test_nothing_is_lost_when_a_ddp_is_made_anew(ranks, rows):
    ranks.run_each(2, lose_nothing, rows, time_limit=240)
