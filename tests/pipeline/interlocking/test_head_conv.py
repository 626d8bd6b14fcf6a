"""The convolutional head: its layers and its training."""

import torch
from torch import nn

from pyparallel.pipeline.interlocking.standard_heads import ConvHead


def test_the_default_is_that_of_the_paper():
    module = ConvHead(10).build(torch.randn(2, 16, 5, 7))
    names = [
        "Conv2d",
        "BatchNorm2d",
        "ReLU",
        "Conv2d",
        "BatchNorm2d",
        "ReLU",
        "GlobalMean",
        "Linear",
    ]
    assert [type(each).__name__ for each in module] == names
    assert [each.weight.shape for each in module if isinstance(each, nn.Conv2d)] == [
        (128, 16, 3, 3),
        (64, 128, 3, 3),
    ]
    assert module[-1].weight.shape == (10, 64)


def test_the_convolutions_keep_the_size_of_the_image():
    value = torch.randn(2, 4, 5, 7)
    module = ConvHead(3, (8, 6)).build(value)
    assert module[:-2](value).shape == (2, 6, 5, 7)


def test_it_learns_what_no_linear_layer_on_the_mean_can():
    # Horizontal and vertical stripes have the same mean.
    torch.manual_seed(4)
    signs = torch.randn(64, 1, 8, 1).sign().expand(-1, -1, -1, 8)
    targets = torch.arange(64) % 2
    images = torch.where(targets.view(-1, 1, 1, 1) == 1, signs, signs.transpose(2, 3)).contiguous()
    head = ConvHead(2, (8, 8)).build(images)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.5
    assert losses[-1] < 0.1
    head.eval()
    assert (head(images).argmax(1) == targets).double().mean() > 0.95
