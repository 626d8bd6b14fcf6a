"""A small convolutional network for digits of 8 x 8 pixels."""

from torch import nn


def build_net() -> nn.Sequential:
    """Build a network from (batch, 1, 8, 8) to (batch, 10) logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def build_net_to_cut() -> nn.Sequential:
    """Build the same network as four modules, between which a pipeline can split it."""
    net = build_net()
    return nn.Sequential(net[:2], net[2:4], net[4:7], net[7:])
