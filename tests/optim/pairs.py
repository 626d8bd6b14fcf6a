"""Pairs of a fused optimizer and torch's of the same name, over equal parameters."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import pyparallel.optim

SHAPES = ((33, 7), (5,), (), (0, 3), (128,))
ALL = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}}


def make_parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


class Pair:
    """Optimizers ``ours`` and ``theirs`` of equal options, each over what ``make`` returns.

    ``torch_options`` are for torch's alone: which of its implementations steps.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], list[Any]] = make_parameters,
        torch_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        own, others = make(), make()
        self.ours = getattr(pyparallel.optim, name)(own, **options)
        theirs = {"foreach": False} if torch_options is None else torch_options
        self.theirs = getattr(torch.optim, name)(others, **options, **theirs)
        self.generator = torch.Generator().manual_seed(2)

    @property
    def both(self):
        return self.ours, self.theirs

    def parameters(self):
        groups = [[p for g in each.param_groups for p in g["params"]] for each in self.both]
        return list(zip(*groups, strict=True))

    def set_gradients(self, missing: Iterable[int] = (), scale: float = 1.0) -> None:
        for index, (own, other) in enumerate(self.parameters()):
            gradient = torch.randn(other.shape, generator=self.generator).mul(scale).to(own.dtype)
            own.grad = None if index in missing else gradient.clone()
            other.grad = None if index in missing else gradient.to(other)

    def step(self, missing: Iterable[int] = (), times: int = 1) -> None:
        for _ in range(times):
            self.set_gradients(missing)
            for each in self.both:
                each.step()

    def check(self, **tolerance: float) -> None:
        """The same parameters and states, up to the roundings of a few steps."""
        tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
        for own, other in self.parameters():
            torch.testing.assert_close(own.detach(), other.detach(), **tolerance)
            mine, state = self.ours.state.get(own, {}), self.theirs.state.get(other, {})
            state = {name: value for name, value in state.items() if value is not None}
            assert mine.keys() == state.keys()
            for name, value in state.items():
                torch.testing.assert_close(mine[name], value, **tolerance, check_dtype=False)


def ulps(found: Tensor, expected: Tensor, *sizes: Tensor) -> float:
    """The largest difference, in units of the last place of the largest of these sizes."""
    assert found.isfinite().all()
    if not found.numel():
        return 0.0
    limits = torch.finfo(found.dtype)
    size = torch.stack([each.detach().abs().double() for each in (expected, *sizes)]).amax(0)
    unit = torch.exp2(size.clamp(min=limits.tiny).log2().floor()) * limits.eps
    return float(((found.double() - expected.double()).abs() / unit).max())


def errors_of_single_steps(
    name: str,
    dtype: torch.dtype,
    *,
    steps: int = 15,
    torch_dtype: torch.dtype | None = None,
    torch_options: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Step both from torch's state, again and again; return the largest error of any step, in ulps.

    Ulps are those of the largest operand: for a parameter of the one before and of what is added
    to it, for a state of the one before and of the gradient (with decay, or its square).
    """
    torch_dtype = torch_dtype or dtype
    pair = Pair(name, lambda: make_parameters(dtype), torch_options, **options)
    if torch_dtype != dtype:
        parameters = [
            nn.Parameter(p.to(torch_dtype)) for p in pair.theirs.param_groups[0]["params"]
        ]
        pair.theirs = getattr(torch.optim, name)(parameters, **options)
    decay = 0.0 if name == "AdamW" else options.get("weight_decay", 0.0)
    worst: dict[str, float] = {}
    for number in range(steps):
        pair.set_gradients(scale=10.0 ** (number % 3 - 1))
        _start_from_theirs(pair)
        before = copy.deepcopy(
            [(own.detach(), pair.ours.state[own]) for own, _ in pair.parameters()]
        )
        for each in pair.both:
            each.step()
        for (own, other), (value, state) in zip(pair.parameters(), before, strict=True):
            with torch.no_grad():
                gradient = own.grad.double().abs() + decay * value.double().abs()
                added = other.double() - value.double()
                if name == "SGD":
                    velocity = state.get("momentum_buffer", torch.zeros_like(value)).abs()
                    added = options["lr"] * (gradient + velocity)
            error = ulps(own.detach(), other.detach(), value, added)
            worst["parameter"] = max(worst.get("parameter", 0.0), error)
            for key, found in pair.ours.state[own].items():
                adds = gradient.square() if key == "exp_avg_sq" else gradient
                sizes = [] if key == "step" else [state.get(key, torch.zeros_like(value)), adds]
                error = ulps(found, pair.theirs.state[other][key], *sizes)
                worst[key] = max(worst.get(key, 0.0), error)
    return worst


@torch.no_grad()
def _start_from_theirs(pair: Pair) -> None:
    """Round torch's parameters and states to our dtype, and copy them into ours in place."""
    for own, other in pair.parameters():
        own.copy_(other)
        other.copy_(own)
        for name, value in pair.theirs.state[other].items():
            if value is not None:
                pair.ours.state[own].setdefault(name, value.to(own.dtype)).copy_(value)
                value.copy_(pair.ours.state[own][name])
