"""ResNet-18 and ResNet-50, of any width, by the names that torchvision gives their parts."""

import torch
from torch import Tensor, nn


class Basic(nn.Module):
    """Two convolutions of 3 x 3."""

    expansion = 1

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.downsample = shortcut(channels, inner, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.downsample(x) + self.bn2(self.conv2(y)))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1."""

    expansion = 4

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * inner)
        self.downsample = shortcut(channels, 4 * inner, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.downsample(x) + self.bn3(self.conv3(y)))


def shortcut(channels: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and channels == outputs:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
    )


class ResNet(nn.Module):
    """Four layers of blocks between a convolution and a linear layer.

    Args:
        block: of which kind.
        counts: of blocks in each layer.
        width: channels of the first layer: 64 in the paper (arXiv 1512.03385).
    """

    def __init__(
        self, block: type[Basic | Bottleneck], counts: tuple[int, ...], width: int, num_classes: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for index, count in enumerate(counts):
            inner = width << index
            blocks = []
            for place in range(count):
                blocks.append(block(channels, inner, 2 if index and not place else 1))
                channels = inner * block.expansion
            self.add_module(f"layer{index + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for index in range(4):
            x = self.get_submodule(f"layer{index + 1}")(x)
        return self.fc(x.mean((2, 3)))


def resnet18(width: int = 64, num_classes: int = 1000) -> ResNet:
    return ResNet(Basic, (2, 2, 2, 2), width, num_classes)


def resnet50(width: int = 64, num_classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), width, num_classes)
