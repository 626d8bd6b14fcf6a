"""Numbers, channels and norms that heads refuse."""

import functools

import pytest
from torch import nn

from pyparallel.pipeline.interlocking.standard_heads import (
    ConvHead,
    LinearHead,
    PooledHead,
    TiedHead,
)


def test_num_outputs(subtests):
    for head in [LinearHead, PooledHead, ConvHead]:
        for num_outputs in [0, -1, 2.0, True, None]:
            with (
                subtests.test(head=head, num_outputs=num_outputs),
                pytest.raises(
                    ValueError, match=f"^num_outputs must be .* integer, got {num_outputs!r}$"
                ),
            ):
                head(num_outputs)


def test_channels(subtests):
    for channels in [(), (8, 0), [8], 8, (8.0,)]:
        with (
            subtests.test(channels=channels),
            pytest.raises(
                ValueError, match=r"^channels must be a tuple of positive integers, .* got"
            ),
        ):
            ConvHead(5, channels)


def test_norm(subtests):
    for norm in [nn.LayerNorm(6), "LayerNorm", int, functools.partial(nn.RMSNorm)]:
        with subtests.test(norm=norm):
            for build in (LinearHead, TiedHead):
                first = 5 if build is LinearHead else nn.Embedding(7, 6)
                with pytest.raises(ValueError, match=r"^norm must be a class of modules .*, got "):
                    build(first, norm)
