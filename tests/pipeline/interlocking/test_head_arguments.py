"""Numbers, channels and norms that heads refuse."""

import functools

import pytest
from torch import nn

from pyparallel.pipeline.interlocking.head_conv import ConvHead
from pyparallel.pipeline.interlocking.head_linear import LinearHead
from pyparallel.pipeline.interlocking.head_pooled import PooledHead
from pyparallel.pipeline.interlocking.head_tied import TiedHead


@pytest.mark.parametrize("head", [LinearHead, PooledHead, ConvHead])
@pytest.mark.parametrize("num_outputs", [0, -1, 2.0, True, None])
def test_num_outputs(head, num_outputs):
    with pytest.raises(ValueError, match=f"^num_outputs must be .* integer, got {num_outputs!r}$"):
        head(num_outputs)


@pytest.mark.parametrize("channels", [(), (8, 0), [8], 8, (8.0,)])
def test_channels(channels):
    with pytest.raises(ValueError, match=r"^channels must be a tuple of positive integers, .* got"):
        ConvHead(5, channels)


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), "LayerNorm", int, functools.partial(nn.RMSNorm)])
def test_norm(norm):
    for build in (LinearHead, TiedHead):
        first = 5 if build is LinearHead else nn.Embedding(7, 6)
        with pytest.raises(ValueError, match=r"^norm must be a class of modules .*, got "):
            build(first, norm)
