"""The networks of the GAN for digits, its score and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

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


def discriminator_net() -> nn.Sequential:
    """Build a network from (batch, 1, 8, 8) to (batch, 1) logits: positive for real digits."""
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
    (mean, cov), (other_mean, other_cov) = (
        (each.mean(0), each.T.cov()) for each in (images.flatten(1).double(), others.flatten(1).double())
    )
    roots = torch.linalg.eigvals(cov @ other_cov).real.clamp(min=0).sqrt()
    return float((mean - other_mean).square().sum() + (cov + other_cov).trace() - 2 * roots.sum())


def draw_gan(
    path: Path,
    question: str,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    best: float,
    rows: Mapping[str, Tensor],
) -> Path:
    """Draw the distance by step as .png, the first curve gray, and below it digits by name."""
    figure, axes = plt.subplots(
        1 + len(rows), 1, figsize=(7, 4 + 0.8 * len(rows)), layout="constrained",
        height_ratios=[4] + [0.8] * len(rows),
    )  # fmt: skip
    for (name, points), color in zip(curves.items(), ("0.55", "tab:blue"), strict=True):
        axes[0].plot(*zip(*points, strict=True), color=color, label=name)
    axes[0].axhline(best, color="k", linestyle=":", label="training digits")
    axes[0].set(title=question, xlabel="step", ylabel="distance to held-out digits", yscale="log")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].grid(alpha=0.3)
    axes[0].legend(frameon=False)
    for below, (name, images) in zip(axes[1:], rows.items(), strict=True):
        below.imshow(torch.cat(list(images[:12, 0].cpu()), 1), cmap="gray_r", vmin=0, vmax=1)
        below.set_title(name, loc="left", fontsize=9)
        below.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path := path.with_suffix(".png"), dpi=120)
    plt.close(figure)
    return path
