"""Loops of a user on each rank, plain or with one of the library's objects, and what changes them.

A feature is a row of `FEATURES`: it acts alike in both loops. The plain ones of all ranks run in
one process, in float64, with a paper's rule between their backward passes, updates and next steps.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import pyparallel.optim

STEPS, WIDTH = 7, 64  # a multiple of 64 entries: buckets, of which codecs see all, have no gaps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra, self.norm, self.drop = nn.Identity(), nn.Identity(), nn.Identity()
        self.skips_extra = self.keeps_mean = False
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.keeps_mean:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.linear(x)
        return self.drop(self.norm(x if self.skips_extra else self.extra(x)).tanh())


@dataclass(frozen=True)
class Feature:
    """What changes a loop.

    Args:
        module: changes a model before it is wrapped.
        optimizer: changes an optimizer before the model is wrapped.
        begin: acts before a step's forward, by its number.
        gradients: acts after backward, before the optimizer's step.
        end: acts after a step, by its number.
        algorithm: changes an algorithm; None: it has no such option.
        options: of the `Loop`.
    """

    module: Callable = lambda module: None
    optimizer: Callable = lambda optimizer: None
    begin: Callable = lambda loop, step: None
    gradients: Callable = lambda loop: None
    end: Callable = lambda loop, step: None
    algorithm: Callable = lambda algorithm: algorithm
    options: Mapping = field(default_factory=dict)


FINDS_UNUSED = {"finds_unused": True}


def each_block(name, make):
    return lambda module: [setattr(block, name, make()) for block in module]


def tie(module):
    module[1].linear.weight = module[0].linear.weight


def freeze_in(steps):
    """Return a feature that freezes a layer's weight in some steps."""

    def freeze(loop, step):
        loop.module[1].linear.weight.requires_grad_(step not in steps)

    return Feature(begin=freeze, options=FINDS_UNUSED)


def skip(loop, step):
    for block in loop.module:
        block.skips_extra = step in (2, 4, 5)


def spoil(loop, step):
    loop.factor = float("inf") if (loop.rank, step) == (1, 3) else 1.0


def swap(loop, step):
    """Evaluate other weights after a step, as an average of them is, and go on."""
    if step == 3:
        own = {name: value.clone() for name, value in loop.state_dict().items()}
        loop.load_state_dict({name: value / 2 for name, value in own.items()})
        loop.load_state_dict(own)


@torch.no_grad()
def project(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.clamp_(-0.1, 0.1)


FEATURES = {
    "dropout": Feature(each_block("drop", lambda: nn.Dropout(0.3))),
    "tied": Feature(tie),
    "frozen": Feature(lambda module: module[1].linear.weight.requires_grad_(False)),
    "frozen later": freeze_in(range(4, STEPS)),
    "frozen a while": freeze_in(range(3, 5)),
    "unused": Feature(
        each_block("extra", lambda: nn.Linear(WIDTH, WIDTH)), begin=skip, options=FINDS_UNUSED
    ),
    "accumulated": Feature(options={"parts": 2}),
    "compiled": Feature(options={"compile": True}),
    "scaler": Feature(begin=spoil, options={"scaler": True}),
    "clipped": Feature(gradients=lambda x: nn.utils.clip_grad_norm_(x.module.parameters(), 0.1)),
    "several optimizers": Feature(options={"several": True}),
    "groups": Feature(options={"groups": True}),
    "our optimizer": Feature(options={"kind": pyparallel.optim.SGD}),
    "batch norm": Feature(each_block("norm", lambda: nn.BatchNorm1d(WIDTH))),
    "buffer assigned": Feature(each_block("keeps_mean", lambda: True)),
    "schedule": Feature(options={"schedule": True}),
    "resumed": Feature(end=lambda loop, step: loop.resume() if step == 3 else None),
    "swapped": Feature(end=swap),
    "post-hook": Feature(optimizer=lambda each: each.register_step_post_hook(project)),
}


class Loop:
    """A user's loop on one rank, plain; ``weight`` is what the paper's rule multiplies z with."""

    parts, factor, weight, momentum = 1, 1.0, 1.0, 0.9
    several = groups = schedule = scaler = compile = sharded = finds_unused = False
    kind = torch.optim.SGD

    def __init__(self, rank, features, dtype=torch.float64, **options):
        self.rank, self.features, self.dtype = rank, features, dtype
        for each in (options, *(each.options for each in features)):
            vars(self).update(each)
        self.losses, self.random = [], torch.Generator().manual_seed(rank).get_state()
        self.set_up()

    def set_up(self):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.module = nn.Sequential(Block(), Block())
            for each in self.features:
                each.module(self.module)
            self.module.to(self.dtype)
        self.shard()
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self.names, self.parameters = map(list, zip(*named, strict=True))
        kinds = [[p for p in self.parameters if (p.dim() == 2) == two] for two in (True, False)]
        groups = [{"params": each, "lr": lr} for each, lr in zip(kinds, (0.1, 0.03), strict=True)]
        groups = [each for each in groups if each["params"]]
        if not self.groups and not self.several:
            groups = [{"params": self.parameters}]
        options = {"lr": 0.1, "momentum": self.momentum, "weight_decay": 0.01}
        split = [[each] for each in groups] if self.several else [groups]
        self.optimizers = [self.optimizer_kind()(each, **options) for each in split]
        for optimizer in self.optimizers:
            self.scale(optimizer)
            for each in self.features:
                each.optimizer(optimizer)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5)
                           for each in self.optimizers if self.schedule]  # fmt: skip
        self.grad_scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0, growth_interval=2, enabled=self.scaler
        )
        self.called = torch.compile(self.module, backend="eager") if self.compile else self.module
        self.forward = self.wrap()

    def optimizer_kind(self):
        return getattr(torch.optim, self.kind.__name__)

    def shard(self):
        """Leave the model whole."""

    def scale(self, optimizer):
        """Let an optimizer step on w z, and its other hooks see z."""

        @torch.no_grad()
        def times(factor):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.mul_(factor())

        optimizer.register_step_pre_hook(lambda *_: times(lambda: self.weight))
        optimizer.register_step_post_hook(lambda *_: times(lambda: 1 / self.weight))

    def wrap(self):
        return self.called

    def no_sync(self):
        return nullcontext()

    def record(self, loss):
        self.losses.append(loss)

    def rate_of(self, parameter):
        groups = [group for each in self.optimizers for group in each.param_groups]
        return next(g["lr"] for g in groups if any(p is parameter for p in g["params"]))

    def state_dict(self):
        return self.module.state_dict()

    def load_state_dict(self, state):
        self.module.load_state_dict(state)
        self.has_loaded = True

    def resume(self):
        """Go on, as a plain loop does."""

    def backward(self, step):
        torch.set_rng_state(self.random)
        for each in self.features:
            each.begin(self, step)
        for each in self.optimizers:
            each.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        inputs, targets = torch.randn(2, 8, WIDTH, generator=generator).to(self.dtype)
        total, parts = 0.0, range(0, 8, 8 // self.parts)
        for begin in parts:
            part = slice(begin, begin + 8 // self.parts)
            with self.no_sync() if begin < parts[-1] else nullcontext():
                loss = 8 / self.parts * (self.forward(inputs[part]) - targets[part]).square().mean()
                self.grad_scaler.scale(loss * self.factor).backward()
            total += loss.item()
        self.record(total)
        self.random = torch.get_rng_state()

    def update(self):
        for each in self.optimizers:
            self.grad_scaler.unscale_(each)
        for each in self.features:
            each.gradients(self)
        for each in self.optimizers:
            self.grad_scaler.step(each)
        self.grad_scaler.update()
        for each in self.schedulers:
            each.step()

    def end(self, step):
        for each in self.features:
            each.end(self, step)

    def train(self):
        """Return the parameters after each step."""
        history = []
        for step in range(STEPS):
            self.backward(step)
            self.update()
            self.end(step)
            history.append(flat(self.module.parameters()))
        return history


def forget_compiled(chosen):
    """Begin as a new process does: only so many models of a class compile in one."""
    if "compiled" in chosen:
        torch.compiler.reset()


def flat(tensors):
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in tensors)
    return torch.cat([each.detach().double().flatten() for each in whole])


def train_plainly(loops, rules):
    """Return what each rank's loop does, with the rules between all of them."""
    histories = [[] for _ in loops]
    for step in range(STEPS):
        for loop in loops:
            loop.has_loaded = False
            loop.backward(step)
        for each in rules:
            each.average_gradients()
            each.before()
        for loop in loops:
            loop.update()
        for each in rules:
            each.after()
        for loop in loops:
            loop.end(step)
        for each in rules if loops[0].has_loaded else ():
            each.reset()
        for loop, history in zip(loops, histories, strict=True):
            history.append(flat(loop.module.parameters()))
    return histories


def every_pair(names, features):
    """Return rows of a name and two features, or one: any two features, and each with any name.

    A latin square: in row i and column j it has name i + j.
    """
    numbers = range(max(len(names), len(features)))
    given = [[each] for each in features] + [[]] * (len(numbers) - len(features))
    return [(names[(i + j) % len(names)], tuple(given[i] + given[j] * (i < j)))
            for i in numbers for j in numbers[i:]]  # fmt: skip
