"""The networks of the GAN for digits, its score and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

NOISE = 16


def generator_net() -> nn.Sequential:
    """Build a network from (batch, 16) of noise to (batch, 1, 8, 8) in [0, 1]."""
    return nn.Sequential(
        nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)),
    )  # fmt: skip


def critic_net() -> nn.Sequential:
    """Build the discriminator, from (batch, 1, 8, 8) to (batch, 1) logits that it is real."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2),
        nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1),
    )  # fmt: skip


@torch.no_grad()
def generate(generator: nn.Module, noise: Tensor) -> Tensor:
    """Return the images of noise in evaluation mode."""
    generator.eval()
    images: Tensor = generator(noise)
    generator.train()
    return images


def frechet_distance(images: Tensor, others: Tensor) -> float:
    """Return that of two Gaussians with the means and covariances of the pixels."""
    pixels, other_pixels = images.flatten(1).double(), others.flatten(1).double()
    cov, other_cov = pixels.T.cov(), other_pixels.T.cov()
    roots = torch.linalg.eigvals(cov @ other_cov).real.clamp(min=0).sqrt()
    between = (pixels.mean(0) - other_pixels.mean(0)).square().sum()
    return float(between + (cov + other_cov).trace() - 2 * roots.sum())


def draw_gan(
    path: Path, question: str, runs: Mapping[str, Sequence[Any]], best: float, real: Tensor
) -> Path:
    """Draw scores and digits of two runs as .png, the first one's curve gray."""
    rows = {"held out": real}
    for name, (_, digits) in runs.items():
        rows[name] = digits
    heights = [4.0] + [1.0] * len(rows)
    figure, (axes, *lower) = plt.subplots(
        len(heights),
        1,
        figsize=(7, sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )

    for (name, (scores, _)), color in zip(runs.items(), ("0.55", "tab:blue"), strict=True):
        axes.plot(*zip(*scores, strict=True), color=color, label=name)
    axes.axhline(best, color="black", linestyle=":", label="training digits")
    axes.set(title=question, xlabel="step", ylabel="distance to held-out digits", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)

    for below, (name, digits) in zip(lower, rows.items(), strict=True):
        twelve = torch.cat(list(digits[:12, 0].cpu()), 1)  # side by side
        below.imshow(twelve, cmap="gray_r", vmin=0, vmax=1)
        below.set_title(name, loc="left", fontsize=9)
        below.set_axis_off()

    path = path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path
