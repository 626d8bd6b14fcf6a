"""Compressed values between ranks, and pipelines that send them."""

import pytest
import torch
from torch import nn

from pyparallel.compression import AttachPoint, Cast, CorruptMessageError, ErrorFeedback, Int8, TopK
from pyparallel.pipeline import GPipe, Interleaved, PipelineTrainer, PipeOptim, StageError
from pyparallel.pipeline.messages.codec import Codec
from tests.compression.catalog import CATALOG

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


SUPPORTED = [
    row.compressor for row in CATALOG if not row.compressor.validation_error(AttachPoint.PIPELINE)
]


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


def test_doubles_are_refused():
    with pytest.raises(ValueError, match="compression supports float32, bfloat16 and float16 only"):
        INT8.encode(torch.randn(3).double(), STREAM, 0)


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
SCHEDULES = [GPipe(), PipeOptim()]


def train_all(rank):
    """Return (losses, bytes sent) of each training."""
    results = {}
    for schedule in SCHEDULES:
        results[schedule, None] = train(two_linears, schedule)
        results[schedule, "both"] = train(two_linears, schedule, **BOTH)
        results[schedule, "again"] = train(two_linears, schedule, **BOTH)
    results["mask", None] = train(masked, GPipe())
    results["mask", "both"] = train(masked, GPipe(), **BOTH)
    cast = {"compress_activations": Cast(), "compress_gradients": Cast()}
    results["cast", None] = train(two_linears, GPipe(), torch.bfloat16)
    results["cast", "both"] = train(two_linears, GPipe(), torch.bfloat16, **cast)
    results["one way"] = train(two_linears, GPipe(), compress_gradients=TopK(0.1))
    results["interleaved"] = train(four_layers, Interleaved(), num_stages=4, **BOTH)
    results["mistakes"] = make_mistakes(rank)
    results["failures"] = [fail(how) for how, _ in FAILURES]
    return results


@pytest.fixture(scope="module")
def results(ranks):
    """Return the results of all trainings on each rank, and the errors of the bad ones."""
    return ranks.run(2, train_all)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "mask"], ids=str)
def test_int8_trains_almost_as_well(results, schedule):
    plain, quantized = (results[1][schedule, how][0] for how in (None, "both"))
    assert plain[-1] < 0.8 * plain[0]
    assert quantized != plain
    torch.testing.assert_close(torch.tensor(quantized), torch.tensor(plain), rtol=0.03, atol=0)


def test_compressed_training_is_deterministic(results):
    for schedule in SCHEDULES:
        assert results[1][schedule, "both"] == results[1][schedule, "again"], schedule


def test_int8_sends_about_a_quarter_of_the_bytes(results, subtests):
    for rank in [0, 1]:
        for schedule in SCHEDULES:
            with subtests.test(rank=rank, schedule=schedule):
                plain, quantized = (results[rank][schedule, how][1] for how in (None, "both"))
                assert 0.24 * plain < quantized < 0.28 * plain


def test_a_cast_of_bfloat16_changes_nothing(results):
    assert results[1]["cast", None][0] == results[1]["cast", "both"][0]


def test_one_direction_alone_can_be_compressed(results):
    plain, sparse = [each[GPipe(), None] for each in results], [each["one way"] for each in results]
    assert plain[0][1] == sparse[0][1]  # activations, uncompressed
    assert 0.2 * plain[1][1] < sparse[1][1] < 0.25 * plain[1][1]
    assert plain[1][0][0] == sparse[1][0][0]
    assert plain[1][0][-1] != sparse[1][0][-1]


def test_several_stages_on_a_rank_train(results):
    losses = results[1]["interleaved"][0]
    assert losses[-1] < 0.8 * losses[0]


class Unsupported(Int8):
    """A compressor that supports no pipeline."""

    def validation_error(self, place):
        return f"compressor must not be used for {place.value}"


MISTAKES = [
    ({"compress_activations": ErrorFeedback(TopK(0.1))}, "compress_activations: compressor must "
     "not have error feedback for pipeline activations and gradients"),
    ({"compress_gradients": Unsupported()}, "compress_gradients: compressor must not be used"),
    ({"compress_gradients": "int8"}, "compress_gradients must be an object "
     "such as Int8() or Cast(), or None, got 'int8'"),
]  # fmt: skip


def make_mistakes(rank):
    errors = []
    for options in [{"compress_activations": Int8(seed=rank)}, *(each for each, _ in MISTAKES)]:
        with pytest.raises(ValueError, match="must") as caught:
            train(two_linears, GPipe(), **options)
        errors.append(str(caught.value))
    return errors


def test_mistakes_are_one_error_on_every_rank(results):
    first, second = (each["mistakes"] for each in results)
    assert first == second
    assert "all ranks must have the same compress_activations, got Int8(" in first[0]
    for error, (_, message) in zip(first[1:], MISTAKES, strict=True):
        assert message in error


class Corrupting(TopK):
    """A compressor whose fifth message has indices out of range."""

    def compress(self, x, state, residual=None):
        values, indices = super().compress(x, state, residual)
        return values, indices + 10**6 * (state.step == 5)


BAD_TRAININGS = {
    "doubles": {"dtype": torch.float64, "compress_gradients": Int8()},
    "corrupt": {"compress_activations": Corrupting(0.1)},
}


def fail(how):
    """Return the error of a training that fails on one rank."""
    torch.manual_seed(0)
    with pytest.raises(StageError) as caught:
        train(two_linears, GPipe(), **BAD_TRAININGS[how])
    return str(caught.value)


FAILURES = [
    (
        "doubles",
        "stage 1 on rank 1 failed in the backward of microbatch 0 (1B0): ValueError: compression "
        "supports float32, bfloat16 and float16 only, got torch.float64",
    ),
    (
        "corrupt",
        "stage 1 on rank 1 failed in the forward of microbatch 4 (1F4): CorruptMessageError: "
        "activations for stage 1 must be encoded by their compressor, got a corrupt message from "
        "rank 0 (",
    ),
]


def test_a_failure_to_encode_or_decode_is_one_error_on_every_rank(results):
    for index, (how, message) in enumerate(FAILURES):
        first, second = (each["failures"][index] for each in results)
        assert first == second, how
        assert first.startswith(message), how
