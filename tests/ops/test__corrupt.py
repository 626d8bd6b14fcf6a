"""Decoding without a counter on a GPU: corrupt entries are left out, and a later call raises.

The CUDA kernels run under the emulator here, on tensors of the CPU.
"""

from functools import partial
from importlib import import_module
from threading import Thread

import pytest
import torch

from pyparallel import ops
from pyparallel.compression import BufferLayout, CorruptMessageError, Int8, Sign, StateStore, TopK
from pyparallel.ops import _corrupt
from tests.csrc.emulated import emulated

CPU = torch.device("cpu")
CORRUPT = "messages must be made by their encoder, got {} corrupt entries on cpu in messages"

if torch.cuda.is_available():
    pytest.skip("the emulator stands in for a GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Take CPU tensors for those of a GPU."""
    monkeypatch.setattr(_corrupt, "_counters", {})
    monkeypatch.setattr(_corrupt, "_is_counted", lambda like: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cpu.current_stream())
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda stream: None, raising=False)
    for module, op in [
        ("quantize", "dequantize"),
        ("pack_signs", "unpack_signs"),
        ("top_k", "scatter_add_"),
        ("mix_quantized", "mix_quantized_"),
    ]:
        name = f"{op.removesuffix('_')}_unchecked"
        monkeypatch.setattr(import_module(f"pyparallel.ops.{module}"), name, emulated(op))


def calls(*, spoiled):
    """Yield calls that decode a message of ones, each with the corrupt entries it finds."""
    ones, weight = torch.ones(100), torch.ones((), dtype=torch.float64)
    scales, kind = torch.full((1,), -1.0 if spoiled else 1.0), {"bits": 8, "block_size": 256}
    codes, words = torch.ones(100, dtype=torch.int8), torch.full((13,), 255, dtype=torch.uint8)
    places = torch.tensor([3, 2 if spoiled else 4])
    yield partial(ops.dequantize, codes, scales, **kind, numel=100), 100
    yield partial(ops.unpack_signs, words, scales, numel=100), 100
    yield partial(ops.scatter_add_, torch.zeros(5), ones[:2], places), 1
    yield (
        partial(
            ops.mix_quantized_, ones, weight, [codes], [scales], torch.ones(1).double(), **kind
        ),
        100,
    )


def test_a_later_call_raises_and_the_next_one_decodes():
    for (spoiled, count), (good, _) in zip(calls(spoiled=True), calls(spoiled=False), strict=True):
        result = spoiled()
        assert result is None or result.sum() in (0, 1), spoiled.func
        with pytest.raises(RuntimeError, match=CORRUPT.format(count)):
            good()
        good()
        good()


def test_a_callers_counter_keeps_calls_quiet():
    for (spoiled, count), (good, _) in zip(calls(spoiled=True), calls(spoiled=False), strict=True):
        corrupt = torch.tensor(7)
        spoiled(corrupt=corrupt)
        assert int(corrupt) == 7 + count
        good()


def test_compressors_raise_with_the_next_message_that_they_make():
    layout = BufferLayout.flat(100)
    for compressor, part in ((Int8(), 1), (Sign(), 1), (TopK(0.1), 1)):
        store = StateStore(compressor, 0, 1)
        state = store.of(layout, CPU)
        message = compressor.compress(torch.randn(100), state)
        spoiled = [each.clone() for each in message]
        spoiled[part].fill_(-1)
        for _ in range(2):  # amid a collective: no error
            compressor.decompress(tuple(spoiled), layout, torch.zeros(100), accumulate=True)
        with pytest.raises(RuntimeError, match=CORRUPT.format(r"\d+")) as caught:
            compressor.compress(torch.randn(100), state)
        assert not isinstance(caught.value, CorruptMessageError)  # no rank is to blame
        compressor.compress(torch.randn(100), state)
        compressor.decompress(tuple(spoiled), layout, torch.zeros(100), accumulate=True)
        with pytest.raises(RuntimeError, match=CORRUPT.format(r"\d+")):
            store.state_dict()
        store.state_dict()


def test_only_the_thread_that_asked_keeps_quiet():
    errors = []

    def decode():
        try:
            next(calls(spoiled=False))[0]()
        except RuntimeError as error:
            errors.append(error)

    next(calls(spoiled=True))[0]()
    with _corrupt.only_counting():
        decode()
        assert errors == []
        thread = Thread(target=decode)
        thread.start()
        thread.join()
    assert len(errors) == 1
