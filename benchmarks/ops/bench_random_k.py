"""``random_k`` and its indices against torch's and numpy's draws, followed by torch's indexing."""

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.harness.measure import Case, Provider, sweep
from pyparallel.ops import random_k, random_k_indices

SHARE = 100  # one entry in 100 is drawn


def draw_by_torch(device: str, numel: int, k: int) -> torch.Tensor:
    return torch.randperm(numel, device=device)[:k].sort().values


def make_draw_by_numpy(device: str, numel: int, k: int) -> Callable[[], torch.Tensor]:
    generator = np.random.default_rng(0)

    def draw() -> torch.Tensor:
        drawn = generator.choice(numel, k, replace=False, shuffle=False)
        return torch.from_numpy(drawn).to(device).sort().values

    return draw


def make_case_of_indices(device: str, numel: int) -> Case:
    k = numel // SHARE
    providers = [
        Provider("pyparallel", lambda: random_k_indices(numel, k, seed=1, device=device)),
        Provider("torch randperm, sort", lambda: draw_by_torch(device, numel, k)),
    ]
    if device == "cpu":
        draw = make_draw_by_numpy(device, numel, k)
        providers.append(Provider("numpy choice, torch sort", draw))
    return Case("random_k", "indices of 1%", numel, 4 * k, providers, device)


def make_case(device: str, numel: int, run_length: int) -> Case:
    k = numel // SHARE
    x, residual = (torch.randn(numel, device=device) for _ in range(2))
    draw_by_numpy = make_draw_by_numpy(device, numel, k)

    def separate_ops() -> None:
        drawn = draw_by_numpy() if device == "cpu" else draw_by_torch(device, numel, k)
        residual.add_(x)
        residual.index_select(0, drawn)
        residual.index_fill_(0, drawn, 0.0)

    def ours() -> None:
        random_k(x, k, seed=1, residual=residual, run_length=run_length)

    draw = "numpy choice" if device == "cpu" else "torch randperm"
    providers = [Provider("pyparallel", ours), Provider(f"{draw}, torch indexing", separate_ops)]
    name = f"1%, residual, runs of {run_length}"
    return Case("random_k", name, numel, 12 * numel + 4 * k, providers, device)


cases = sweep((make_case_of_indices, [()]), (make_case, [(1,), (32,)]))
