"""Every pair of features trains with every schedule as the plain run does, or is refused.

A feature changes how a trainer is built or called, and likewise the plain run: torch's own loop for
schedules that flush, else the papers' rules with a full history (``reference.py``).
"""

import copy
import itertools
import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, linear
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from pyparallel import optim
from pyparallel.pipeline import (
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
    SpecTrain,
    XPipe,
    ZeroBubble,
)
from tests.cases import slow
from tests.pipeline import reference

WIDTH, SPLIT, NUM_MICROBATCHES, RATE, MAX_NORM, IGNORED = 5, [3], 4, 0.05, 0.02, -100
HALVES = [[0, 1], [2, 3]]  # steps before a flush, and after it


@dataclass(frozen=True)
class Setting:
    """What a run is with; each feature is a field."""

    dropout: bool = False
    tied: bool = False  # the first weight and the last
    frozen: bool = False
    frozen_later: bool = False  # after the flush
    accumulated: bool = False
    compiled: bool = False
    scaled: bool = False
    clipped: bool = False
    by_tokens: bool = False
    scheduled: bool = False
    recomputed: bool = False
    reused: bool = False  # the memory of batches
    resumed: bool = False  # after the flush, from a saved state
    evaluated: bool = False  # after the flush
    fused: bool = False  # optimizers of pyparallel.optim
    two_optimizers: bool = False

    @property
    def dtype(self):
        return torch.float32 if self.scaled or self.fused else torch.float64

    def rates(self, count):
        return 0.7**count if self.scheduled else 1.0


FEATURES = list(Setting.__dataclass_fields__)
NEEDS_A_FLUSH = {"accumulated": "gradient_accumulation_steps", "scaled": "grad_scaler"}
# With a window of all stages no head is learned from.
HEADS = Interlocking(2, heads=LinearHead(WIDTH))
NOT_WITH_HEADS = {"clipped", "tied", *NEEDS_A_FLUSH}
FLUSHING = [OneForwardOneBackward(), ZeroBubble(), HEADS]
STREAMING = [PipeDream(), PipeDream2BW(), SpecTrain(1), XPipe("live")]
STREAMING += [PipeOptim("live"), PipeOptim("consistent")]


class Masked(nn.Module):
    """Dropout whose masks are kept, or given."""

    def __init__(self, given, p):
        super().__init__()
        self.given, self.p, self.drawn = list(given), p, []

    def forward(self, x):
        if not self.training:
            return x
        mask = self.given.pop(0) if self.given else dropout(torch.ones_like(x), self.p)
        self.drawn.append(mask)
        return x * mask


class Layer(nn.Linear):
    """A layer that learns in its first ``limit`` forwards alone, which may be recomputed."""

    limit, recomputed = None, False

    def forward(self, x):
        weight = self.weight
        if self.limit is not None and self.training:
            self.limit -= 1
            weight = weight if self.limit >= 0 else weight.detach()
        if self.recomputed:
            return checkpoint(
                lambda x: linear(x, self.weight, self.bias).tanh(), x, use_reentrant=False
            )
        return linear(x, weight, self.bias).tanh()


class Sent(Layer):
    """Returns its weight too, for ``Received``: what a tied weight of a later stage means."""

    def forward(self, x):
        return super().forward(x), self.weight


class Beside(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, values):
        return self.layer(values[0]), values[1]


class Received(nn.Module):
    def forward(self, values):
        return linear(*values)


def build(setting, masks=None, *, seed=0):
    """Return the layers; with ``masks``, those of dropout, for the plain run."""
    torch.manual_seed(seed)
    p = 0.3 if setting.dropout else 0.0
    of_layer = {1: [], 4: []} if masks is None else masks
    layers = [
        Layer(WIDTH, WIDTH), Masked(of_layer[1], p), Layer(WIDTH, WIDTH),
        Layer(WIDTH, WIDTH), Masked(of_layer[4], p), nn.Linear(WIDTH, WIDTH, bias=False),
    ]  # fmt: skip
    layers = [layer.to(setting.dtype) for layer in layers]
    if setting.tied:
        layers[5].weight = layers[0].weight
    if setting.frozen:
        layers[2].weight.requires_grad_(False)
    layers[3].recomputed = setting.recomputed and masks is None
    return layers


def build_history(setting, masks):
    """Return layers for the full history, in which nothing is tied or frozen later."""
    layers = build(setting, masks)
    if setting.frozen_later:
        layers[3].limit = len(HALVES[0]) * NUM_MICROBATCHES
    if setting.tied:
        sent = Sent(WIDTH, WIDTH).to(setting.dtype)
        sent.load_state_dict(layers[0].state_dict())
        between = [Beside(layer) for layer in layers[1:5]]
        layers = [sent, *between, Received()]
    return layers


def optimizer_fn(setting, parameters):
    sgd = partial(optim.SGD if setting.fused else torch.optim.SGD, lr=RATE, momentum=0.9)
    if not setting.two_optimizers:
        return sgd(parameters)
    matrices = [p for p in parameters if p.dim() == 2]
    vectors = [p for p in parameters if p.dim() == 1]
    return [sgd(each) for each in (matrices, vectors) if each]


def draw_batch(setting, step):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(12, WIDTH, generator=draw, dtype=torch.float64).to(setting.dtype)
    target = torch.randint(WIDTH, (12,), generator=draw)
    if setting.by_tokens:
        target[torch.rand(12, generator=draw) < 0.3] = IGNORED
        target[::3] = 1  # some in each microbatch
    return x, target


def count(target):
    return int((target != IGNORED).sum())


def named_weights(layers):
    names = {f"{i}.{n}": p for i, layer in enumerate(layers) for n, p in layer.named_parameters()}
    return {name: p.detach().clone() for name, p in names.items()}


def train(rank, schedule, setting):
    """Return the weights of this rank's layers, and the masks by layer."""
    masks = {1: [], 4: []}
    x, target = draw_batch(setting, 0)

    def build_trainer(seed):
        layers = build(setting, seed=seed)
        stages = (
            [torch.compile(each, backend="eager") for each in layers]
            if setting.compiled
            else layers
        )
        trainer = PipelineTrainer(
            stages, cross_entropy, partial(optimizer_fn, setting), schedule,
            num_microbatches=NUM_MICROBATCHES, split=SPLIT,
            gradient_accumulation_steps=2 if setting.accumulated else 1,
            grad_scaler=torch.amp.GradScaler("cpu", init_scale=8.0) if setting.scaled else None,
            max_norm=MAX_NORM if setting.clipped else None,
            loss_weight_fn=count if setting.by_tokens else None,
            scheduler_fn=partial(LambdaLR, lr_lambda=setting.rates) if setting.scheduled else None,
        )  # fmt: skip
        trainer.prepare(x, target)
        for index, drawn in masks.items():
            layers[index].drawn = drawn
        return trainer, layers

    if setting.compiled:
        torch.compiler.reset()
    trainer, layers = build_trainer(0)
    for number, steps in enumerate(HALVES):
        if number and setting.evaluated:
            trainer.evaluate(x, target)
        if number and setting.resumed:
            state = copy.deepcopy(trainer.state_dict())
            trainer, layers = build_trainer(1)
            trainer.load_state_dict(state)
        if number and setting.frozen_later:
            layers[3].weight.requires_grad_(False)
        for step in steps:
            batch = draw_batch(setting, step)
            if setting.reused:
                x.copy_(batch[0])
                target.copy_(batch[1])
                batch = x, target
            trainer.step(*batch)
        trainer.flush()
    return named_weights(layers), masks


def train_plainly(setting, masks):
    """Train the whole model as torch does, with an update for each step or two."""
    layers = build(setting, masks)
    optimizers = optimizer_fn(replace(setting, fused=False), [*{
        p: None for layer in layers for p in layer.parameters() if p.requires_grad}])  # fmt: skip
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    schedulers = [LambdaLR(each, setting.rates) for each in optimizers]
    model = nn.Sequential(*layers)
    for number, steps in enumerate(HALVES):
        if number and setting.frozen_later:
            layers[3].weight.requires_grad_(False)
        for window in [steps] if setting.accumulated else [[step] for step in steps]:
            batches = [draw_batch(setting, step) for step in window]
            for batch in batches:
                # The mean over the tokens of the window, or of the means of its steps.
                total = sum(count(y) for _, y in batches) if setting.by_tokens else 12 * len(window)
                for x, y in zip(*(each.chunk(NUM_MICROBATCHES) for each in batch), strict=True):
                    (cross_entropy(model(x), y) * count(y) / total).backward()
            if setting.clipped:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            for each in (*optimizers, *schedulers):
                each.step()
            for each in optimizers:
                each.zero_grad()
    return named_weights(layers)


def train_with_history(schedule, setting, masks):
    streams = [[draw_batch(setting, step) for step in steps] for steps in HALVES]
    done = reference.train_in_one_process(
        partial(build_history, setting, masks), SPLIT, cross_entropy,
        partial(optimizer_fn, replace(setting, fused=False)), schedule, streams, NUM_MICROBATCHES,
        rates=setting.rates, max_norm=MAX_NORM if setting.clipped else None,
        weigh=count if setting.by_tokens else len,
    )  # fmt: skip
    return {name.replace("layer.", ""): value for name, value in done.state.items()}


def train_all(rank, cases):
    return [train(rank, schedule, setting) for schedule, setting in cases]


def check(ranks, subtests, cases):
    for (schedule, setting), found in zip(
        cases, zip(*ranks.run(2, train_all, cases, time_limit=600), strict=True), strict=True
    ):
        on = [name for name in FEATURES if getattr(setting, name)]
        with subtests.test(f"{schedule}: {', '.join(on)}"):
            masks = {1: found[0][1][1], 4: found[1][1][4]}
            if schedule in FLUSHING:
                expected = train_plainly(setting, masks)
            else:
                expected = train_with_history(schedule, setting, masks)
            places = [0 if int(name[0]) < SPLIT[0] else 1 for name in expected]
            ours = {name: found[r][0][name] for name, r in zip(expected, places, strict=True)}
            tolerance = 1e-10 if setting.dtype == torch.float64 else 2e-5
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def allowed(schedule):
    refused = (
        NOT_WITH_HEADS if schedule == HEADS else NEEDS_A_FLUSH if schedule in STREAMING else ()
    )
    return [name for name in FEATURES if name not in refused]


def of(*names):
    return Setting(**dict.fromkeys(names, True))


def halves(schedule, seed):
    """Return two settings that share out the features; compiling takes seconds."""
    names = [name for name in allowed(schedule) if name != "compiled"]
    random.Random(seed).shuffle(names)
    return [(schedule, of(*names[::2])), (schedule, of(*names[1::2]))]


def halves_with_every_pair(schedule):
    """Return settings of half the features each, until any two have been in one together."""
    draw, names = random.Random(0), allowed(schedule)
    if schedule not in OF_KINDS:
        names.remove("compiled")
    settings, apart = [], {*itertools.combinations(names, 2)}
    while apart:
        samples = [draw.sample(names, len(names) // 2) for _ in range(100)]
        together = [
            apart & {*itertools.combinations(sorted(each, key=names.index), 2)} for each in samples
        ]
        most = max(range(100), key=lambda number: len(together[number]))
        apart -= together[most]
        settings.append((schedule, of(*samples[most])))
    return settings


OF_KINDS = [FLUSHING[0], HEADS, STREAMING[1], STREAMING[4]]
SAMPLE = [case for seed, schedule in enumerate(OF_KINDS) for case in halves(schedule, seed)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAMPLE, id="sample"),
        *(slow(halves_with_every_pair(each)) for each in (*FLUSHING, *STREAMING)),
    ],
)
def test_features_that_go_together_train_as_the_plain_run(ranks, subtests, cases):
    check(ranks, subtests, cases)


@pytest.mark.parametrize("name", NEEDS_A_FLUSH)
def test_features_that_need_a_flush_are_refused_without(name):
    for schedule in STREAMING:
        with pytest.raises(ValueError, match=f"^{NEEDS_A_FLUSH[name]} must"):
            train(0, schedule, of(name))
