"""A head with convolutions."""

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from typing_extensions import override

from ...comm import Value
from .head_arguments import check_channels, check_num_outputs
from .head_pooled import GlobalMean
from .heads import Head


@dataclass(frozen=True)
class ConvHead(Head):
    """A head of 3 x 3 convolutions with batch normalization and ReLU, global mean, linear layer.

    The default is ``conv128_bn_conv64_bn_gbpl_fc`` in the notation of the authors' code for
    arXiv 2010.04116. Maps (batch, channels, height, width) to (batch, num_outputs). The
    convolutions keep the image size and have no bias, as the normalization has one.

    Args:
        num_outputs: classes, or numbers to predict.
        channels: output channels of each convolution, at least one.
    """

    num_outputs: int
    channels: tuple[int, ...] = (128, 64)

    def __post_init__(self) -> None:
        check_num_outputs(self.num_outputs)
        check_channels(self.channels)

    @override
    def build(self, example: Value) -> nn.Module:
        fits = isinstance(example, Tensor) and example.dim() == 4
        checked = self._check(example, "of shape (batch, channels, height, width)", fits=fits)
        layers: list[nn.Module] = []
        for before, after in pairwise((checked.shape[1], *self.channels)):
            conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
        linear = nn.Linear(self.channels[-1], self.num_outputs)
        return nn.Sequential(*layers, GlobalMean((2, 3)), linear).to(checked.device, checked.dtype)
