"""Compressed values between ranks, and pipelines that send them."""

import re

import pytest
import torch
from torch import nn

from pyparallel.compression import AttachPoint, Cast, CorruptMessageError, ErrorFeedback, Int8, TopK
from pyparallel.pipeline import GPipe, Interleaved, PipelineTrainer, PipeOptim, StageError
from pyparallel.pipeline.messages.codec import Codec
from tests.compression.catalog import CATALOG
from tests.workers import assert_equal_on_all_ranks, call_each

STREAM = "activations for stage 1"
INT8 = Codec(Int8(), rank=0)
VALUES = {
    "a tensor": torch.randn(4, 70),
    "that needs a gradient": torch.randn(4, 70).requires_grad_(),
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "not contiguous": torch.randn(5, 6).t(),
    "0-d": torch.tensor(0.5),
    "empty": torch.empty(0, 7),
    "whole numbers": torch.arange(6).view(2, 3),
    "a tuple": (torch.randn(4, 7), torch.ones(4, dtype=torch.int64), torch.randn(2).half()),
    "a tuple of one": (torch.randn(4, 7),),
    "a tuple of none": (),
}


def tuple_of(value):
    return (value,) if isinstance(value, torch.Tensor) else value


def test_values_decode_to_what_was_encoded(subtests):
    for compressor in [Int8(), Int8(seed=3), Cast(), TopK(1.0)]:
        for name, value in VALUES.items():
            with subtests.test(compressor=compressor, name=name):
                codec = Codec(compressor, rank=0)
                found = codec.decode(codec.encode(value, STREAM, 3), STREAM)
                assert type(found) is type(value)
                for ours, theirs in zip(tuple_of(found), tuple_of(value), strict=True):
                    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
                    assert ours.requires_grad == theirs.requires_grad
                    assert ours.is_leaf
                    exact = not theirs.is_floating_point()
                    tolerance = (
                        0 if exact or not theirs.numel() else 0.02 * theirs.abs().max().item()
                    )
                    torch.testing.assert_close(
                        ours, theirs, rtol=0, atol=tolerance, check_stride=False
                    )


SUPPORTED = [row.compressor for row in CATALOG if not row.compressor.error_at(AttachPoint.PIPELINE)]


def test_every_supported_compressor_decodes(subtests):
    for compressor in SUPPORTED:
        with subtests.test(compressor=compressor):
            values = (
                torch.randn(6, 40),
                torch.randn(3).bfloat16(),
                torch.empty(0),
                torch.tensor(2.0),
            )
            sent = Codec(compressor, rank=0).encode(values, STREAM, 7)
            found = Codec(compressor, rank=1).decode(sent, STREAM)
            for ours, theirs in zip(found, values, strict=True):
                assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
                assert ours.isfinite().all()
            assert (
                torch.nn.functional.cosine_similarity(found[0].view(-1), values[0].view(-1), 0)
                > 0.1
            )
            codec = Codec(compressor, rank=0)
            values[0][2, 3] = float("nan")
            assert not codec.decode(codec.encode(values, STREAM, 8), STREAM)[0].isfinite().all()


def test_draws_depend_on_rank_stream_and_number_alone():
    value = torch.randn(100)
    codec = Codec(Int8(seed=1), rank=0)
    first = codec.encode(value, STREAM, 3)[2]
    codec.encode(value, STREAM, 4)
    assert torch.equal(codec.encode(value, STREAM, 3)[2], first)
    assert torch.equal(Codec(Int8(seed=1), rank=0).encode(value, STREAM, 3)[2], first)
    for other in [
        codec.encode(value, STREAM, 5),
        codec.encode(value, "activations for stage 2", 3),
        Codec(Int8(seed=1), rank=1).encode(value, STREAM, 3),
    ]:
        assert not torch.equal(other[2], first)


CORRUPTIONS = [
    (lambda parts: (torch.empty(0, 2), *parts[1:]), r"a first tensor of shape \[0, 2\]"),
    (lambda parts: parts[:1], "got 0 tensors instead of one"),
    (lambda parts: parts[:2], r"for a placeholder, and 0 tensors after it"),
    (lambda parts: (parts[0], torch.zeros(3)), r"got torch.float32 of shape \[3\]"),
    (lambda parts: (parts[0], torch.empty(0, 0).double()), "got torch.float64"),
    (lambda parts: (*parts[:2], parts[2][1:], parts[3]), "codes"),
]


def test_corrupt_messages_are_refused(subtests):
    for corrupt, message in CORRUPTIONS:
        with subtests.test(message=message):
            parts = INT8.encode(torch.randn(40), STREAM, 0)
            with pytest.raises(CorruptMessageError, match=message):
                INT8.decode(corrupt(parts), STREAM)


class Masked(nn.Module):
    """Returns an int64 mask beside its output."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).tanh(), (x > 0).long()


class Applied(nn.Module):
    """Takes a value and the mask."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 8)

    def forward(self, x):
        values, mask = x
        assert mask.dtype == torch.int64
        return self.linear(values * (mask + 1))


def two_linears(width):
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Linear(width, 8)]


def four_layers(width):
    return [each for _ in range(3) for each in two_linears(width)[:1]] + two_linears(width)[1:]


def masked(width):
    return [Masked(width), Applied(width)]


def train(make_layers, schedule, dtype=torch.float32, steps=12, **options):
    """Train; return the losses of all steps and of an evaluation, and the bytes sent."""
    torch.manual_seed(0)
    layers = [layer.to(dtype) for layer in make_layers(256)]
    trainer = PipelineTrainer(
        layers,
        lambda output, target: nn.functional.mse_loss(output.float(), target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        schedule,
        num_microbatches=2,
        split=range(1, len(layers)),
        **options,
    )
    inputs, target = torch.randn(128, 256).to(dtype), torch.randn(128, 8)
    losses = [trainer.step(inputs, target) for _ in range(steps)]
    losses.append(trainer.evaluate(inputs, target))
    return losses, trainer.bytes_sent


BOTH = {"compress_activations": Int8(), "compress_gradients": Int8(seed=1)}


def int8_trains_almost_as_well_with_a_quarter_of_the_bytes(rank):
    for make_layers, schedule in (
        (two_linears, GPipe()),
        (two_linears, PipeOptim()),
        (masked, GPipe()),
    ):
        plain, all_bytes = train(make_layers, schedule)
        quantized, fewer_bytes = train(make_layers, schedule, **BOTH)
        again = train(make_layers, schedule, **BOTH)  # deterministic; rank 0 begins with a nan
        assert repr(again) == repr((quantized, fewer_bytes))
        if make_layers is two_linears:
            assert 0.24 * all_bytes < fewer_bytes < 0.28 * all_bytes
        if rank == 1:
            assert plain[-1] < 0.8 * plain[0]
            assert quantized != plain
            assert quantized == pytest.approx(plain, rel=0.03)


def a_cast_of_bfloat16_changes_nothing(rank):
    cast = {"compress_activations": Cast(), "compress_gradients": Cast()}
    plain, _ = train(two_linears, GPipe(), torch.bfloat16)
    assert train(two_linears, GPipe(), torch.bfloat16, **cast)[0] == plain


def one_direction_alone_can_be_compressed(rank):
    plain, all_bytes = train(two_linears, GPipe())
    sparse, fewer_bytes = train(two_linears, GPipe(), compress_gradients=TopK(0.1))
    if rank == 0:
        assert fewer_bytes == all_bytes  # activations, uncompressed
    else:
        assert 0.2 * all_bytes < fewer_bytes < 0.25 * all_bytes
        assert plain[0] == sparse[0]
        assert plain[-1] != sparse[-1]


def several_stages_on_a_rank_train(rank):
    losses, _ = train(four_layers, Interleaved(), num_stages=4, **BOTH)
    assert losses[-1] < 0.8 * losses[0]


class Unsupported(Int8):
    """A compressor that supports no pipeline."""

    def error_at(self, place):
        return f"compressor must not be used for {place.value}"


MISTAKES = [
    ({"compress_activations": ErrorFeedback(TopK(0.1))}, "compress_activations: compressor must "
     "not have error feedback for pipeline activations and gradients"),
    ({"compress_gradients": Unsupported()}, "compress_gradients: compressor must not be used"),
    ({"compress_gradients": "int8"}, "compress_gradients must be an object "
     "such as Int8() or Cast(), or None, got 'int8'"),
]  # fmt: skip


def mistakes_are_one_error_on_every_rank(rank):
    differ = "all ranks must have the same compress_activations, got Int8("
    for options, message in [({"compress_activations": Int8(seed=rank)}, differ), *MISTAKES]:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            train(two_linears, GPipe(), **options)
        assert_equal_on_all_ranks(str(caught.value))


class Corrupting(TopK):
    """A compressor whose fifth message has indices out of range."""

    def compress(self, x, state, residual=None):
        values, indices = super().compress(x, state, residual)
        return values, indices + 10**6 * (state.step == 5)


FAILURES = [
    (
        {"dtype": torch.float64, "compress_gradients": Int8()},
        "stage 1 on rank 1 failed in the backward of microbatch 0 (1B0): ValueError: compression "
        "supports float32, bfloat16 and float16 only, got torch.float64",
    ),
    (
        {"compress_activations": Corrupting(0.1)},
        "stage 1 on rank 1 failed in the forward of microbatch 4 (1F4): CorruptMessageError: "
        "activations for stage 1 must be encoded by their compressor, got a corrupt message from "
        "rank 0 (",
    ),
]


def a_failure_to_encode_or_decode_is_one_error_on_every_rank(rank):
    for options, message in FAILURES:
        with pytest.raises(StageError, match=f"^{re.escape(message)}") as caught:
            train(two_linears, GPipe(), **options)
        assert_equal_on_all_ranks(str(caught.value))


CASES = [
    int8_trains_almost_as_well_with_a_quarter_of_the_bytes,
    a_cast_of_bfloat16_changes_nothing,
    one_direction_alone_can_be_compressed,
    several_stages_on_a_rank_train,
    mistakes_are_one_error_on_every_rank,
    a_failure_to_encode_or_decode_is_one_error_on_every_rank,
]


def test_cases(ranks):
    ranks.run(2, call_each, [(case,) for case in CASES])
