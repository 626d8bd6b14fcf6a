"""Decoding without a counter on a GPU: corrupt entries are left out, and a later call raises.

Without a GPU the CUDA kernels run under the emulator, on tensors of the CPU.
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

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CORRUPT = (
    f"messages must be made by their encoder, got {{}} corrupt entries on {DEVICE} in messages"
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Have a new counter; without a GPU, take CPU tensors for those of one."""
    monkeypatch.setattr(_corrupt, "_counters", {})
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(_corrupt, "_is_counted", lambda like: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cpu.current_stream())
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda stream: None, raising=False)
    for module, op in [
        ("quantize", "dequantize"),
        ("pack_signs", "unpack_signs"),
        ("pack_signs", "dequantize_statistical"),
        ("top_k", "scatter_add_"),
        ("top_k", "scatter_chunks"),
        ("mix_quantized", "mix_quantized_"),
    ]:
        name = f"_{op.removesuffix('_')}_checked"
        monkeypatch.setattr(import_module(f"pyparallel.ops.{module}"), name, emulated(op))


def run(call, **options):
    """Call, and wait until a GPU is done."""
    result = call(**options)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def calls(*, spoiled):
    """Return calls that decode a message of ones, each with the corrupt entries it finds."""
    kind = {"bits": 8, "block_size": 256}
    with DEVICE:
        ones, weight = torch.ones(100), torch.ones((), dtype=torch.float64)
        scales = torch.full((1,), -1.0 if spoiled else 1.0)
        codes, words = torch.ones(100, dtype=torch.int8), torch.full((13,), 255, dtype=torch.uint8)
        dense, places = torch.zeros(5), torch.tensor([3, 2 if spoiled else 4])
        means = torch.full((4,), torch.inf if spoiled else 0.01)
        ascending = torch.tensor([0, 16, 0, 2, 48, 0, 4, 0], dtype=torch.uint8)
        chunk_indices = torch.zeros_like(ascending) if spoiled else ascending
        masses = torch.ones(1, dtype=torch.float64)
    mix = partial(ops.mix_quantized_, ones.clone(), weight, [codes], [scales], masses, **kind)
    return [
        (partial(ops.dequantize, codes, scales, **kind, numel=100), 100),
        (partial(ops.unpack_signs, words, scales, numel=100), 100),
        (partial(ops.dequantize_statistical, words.repeat(2)[:25], means, numel=100), 100),
        (partial(ops.scatter_add_, dense, ones[:2], places), 1),
        (partial(ops.scatter_chunks, ones[:5], chunk_indices, 5, numel=100), 4),
        (mix, 100),
    ]


def test_a_later_call_raises_and_the_next_one_decodes():
    for (spoiled, count), (good, _) in zip(calls(spoiled=True), calls(spoiled=False), strict=True):
        result = run(spoiled)
        assert result is None or result.sum() in (0, 1), spoiled.func
        with pytest.raises(RuntimeError, match=CORRUPT.format(count)):
            good()
        good()
        good()


def test_a_callers_counter_keeps_calls_quiet():
    for (spoiled, count), (good, _) in zip(calls(spoiled=True), calls(spoiled=False), strict=True):
        corrupt = torch.tensor(7, device=DEVICE)
        run(spoiled, corrupt=corrupt)
        assert int(corrupt) == 7 + count
        good()


def test_compressors_raise_with_the_next_message_that_they_make():
    layout = BufferLayout.flat(100)
    for compressor, part in ((Int8(), 1), (Sign(), 1), (TopK(0.1), 1)):
        store = StateStore(compressor, 0, 1)
        state = store.of(layout, DEVICE)
        x, out = torch.randn(100, device=DEVICE), torch.zeros(100, device=DEVICE)
        message = compressor.compress(x, state)
        spoiled = [each.clone() for each in message]
        spoiled[part].fill_(-1)
        for _ in range(2):  # amid a collective: no error
            run(partial(compressor.decompress, tuple(spoiled), layout, out, accumulate=True))
        with pytest.raises(RuntimeError, match=CORRUPT.format(r"\d+")) as caught:
            compressor.compress(x, state)
        assert not isinstance(caught.value, CorruptMessageError)  # no rank is to blame
        compressor.compress(x, state)
        compressor.decompress(tuple(spoiled), layout, out, accumulate=True)
        with pytest.raises(RuntimeError, match=CORRUPT.format(r"\d+")):
            store.state_dict()
        store.state_dict()


def test_only_the_thread_that_asked_keeps_quiet():
    errors = []

    def decode():
        try:
            calls(spoiled=False)[0][0]()
        except RuntimeError as error:
            errors.append(error)

    run(calls(spoiled=True)[0][0])
    with _corrupt.only_counting():
        decode()
        assert errors == []
        thread = Thread(target=decode)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_the_first_decode_may_run_in_inference_mode():
    """Later decodes write to the same counter outside of the mode."""
    spoiled, count = calls(spoiled=True)[0]
    with torch.inference_mode():
        run(spoiled)
    with pytest.raises(RuntimeError, match=CORRUPT.format(count)):
        run(spoiled)
    counter = _corrupt.corrupt_counter(None, torch.empty(0, device=DEVICE))
    assert not counter.is_inference()
    counter.add_(0)
