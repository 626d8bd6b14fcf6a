"""scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, some held out; no download."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor

NUM_TEST = 360  # of 1,797: the last fifth of a fixed shuffle

Batch = tuple[Tensor, Tensor]


def load_images(device: torch.device | None = None) -> tuple[Batch, Batch]:
    """Return training images (n, 1, 8, 8) in [0, 1] and labels (n,), and the held-out ones."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-NUM_TEST], order[-NUM_TEST:]
    return (images[train], labels[train]), (images[test], labels[test])
