"""A CUDA library that cannot run here is not loaded, for a reason that is one sentence."""

import ctypes
import importlib.util
from pathlib import Path

import pytest
import torch

from pyparallel import ops
from pyparallel.ops import Backend, _library

EVERY_CARD = "80-real 90-real 100 120-real"
OTHER_CARD = (
    "built for {} and not for cuda:{} of compute capability {}: build on this machine, for 8.0 or "
    "newer, or leave that card out of CUDA_VISIBLE_DEVICES"
)
OLD_CARD = OTHER_CARD.format(EVERY_CARD, 0, 7.5)


class Driver:
    """A libcuda.so.1 with these cards; without any cuInit fails, as where they are hidden."""

    def __init__(self, version, cards):
        self.version, self.cards = version, cards

    def cuInit(self, flags):  # noqa: N802
        return 0 if self.cards else 100

    def cuDriverGetVersion(self, number):  # noqa: N802
        number._obj.value = self.version

    def cuDeviceGetCount(self, number):  # noqa: N802
        number._obj.value = len(self.cards)

    def cuDeviceGetAttribute(self, number, attribute, card):  # noqa: N802
        number._obj.value = int(self.cards[card].split(".")[attribute - 75])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that loads a library for CUDA as on another machine."""
    # Accelerate has set it for this process, if a test has used it.
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)

    def load(cuda, driver, cards=(), built=EVERY_CARD):
        def open_library(name):
            assert name == "libcuda.so.1"
            if driver == 0:
                raise OSError("libcuda.so.1: cannot open shared object file")
            return Driver(driver, cards)

        (tmp_path / "libpyparallel_cuda.so").touch()
        (tmp_path / "build.json").write_text(f'{{"cuda": "built with nvcc 13.0.88 for {built}"}}')
        monkeypatch.setattr(_library, "_NATIVE_FOLDER", tmp_path)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(ctypes, "CDLL", open_library)
        found = _library.load_native("cuda")
        assert not found.ops
        # A library that is tried is none: it has no bytes.
        tried = "it does not load" in found.unavailable_reason
        return None if tried else found.unavailable_reason

    return load


def test_the_driver_is_asked_where_there_is_one(monkeypatch):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    version, cards = _library._ask_driver()
    assert (version >= 12000) == torch.cuda.is_available()
    number = torch.cuda.device_count()
    assert cards == [
        10 * major + minor for major, minor in map(torch.cuda.get_device_capability, range(number))
    ]


@pytest.mark.parametrize(
    ("cuda", "driver", "cards", "reason"),
    [
        (None, 0, [], "built, but not loaded: this torch has no CUDA"),
        ("12.8", 12080, ["9.0"], "built with CUDA 13, which this driver for CUDA 12.8 cannot run: "
         "update the driver"),
        ("12.8", 13000, ["9.0"], None),  # the library has a CUDA runtime of its own
        ("13.2", 0, [], None),  # no driver and no GPU
        ("13.2", 13020, [], None),  # CUDA_VISIBLE_DEVICES is empty
        ("13.2", 13020, ["8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1", "13.0"], None),
        ("13.2", 13020, ["7.5"], OLD_CARD),
        ("13.2", 13020, ["8.6", "7.5"], OLD_CARD.replace("cuda:0", "cuda:1")),
    ],
)  # fmt: skip
def test_a_cuda_library_that_cannot_run_is_not_loaded(machine, cuda, driver, cards, reason):
    assert machine(cuda, driver, cards) == reason


@pytest.mark.parametrize(
    ("built", "card", "runs"),
    [
        ("89-real", "8.9", True),
        ("89-real", "8.6", False),  # machine code of a later card
        ("86-real", "9.0", False),  # machine code of another generation
        ("86", "9.0", True),  # PTX
        ("90", "8.9", False),
        ("all-major", "8.9", True),  # the library is tried where its cards are not listed
    ],
)
def test_a_library_for_other_cards_is_not_loaded(machine, built, card, runs):
    reason = machine("13.2", 13020, [card], built)
    assert reason == (None if runs else OTHER_CARD.format(built, 0, card))


def test_a_process_whose_forks_shall_use_cuda_does_not_start_it(machine, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    assert machine("13.2", 13020, ["7.5"]) is None


def test_ops_that_run_slower_than_built_are_named_in_one_warning(monkeypatch, recwarn):
    cpu = Backend("compiled C++", ops=frozenset(ops.names()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for path in (None, "libpyparallel_cuda.so"):  # what was never built is no surprise
        backends = {"cpu": (cpu,), "cuda": (Backend("compiled CUDA", path, OLD_CARD),)}
        _library.warn_of_slower_ops(backends)
    (warning,) = recwarn
    assert str(warning.message) == (
        "pyparallel runs its GPU ops in Triton and plain PyTorch, which is slower: the compiled "
        f"library is {OLD_CARD}; `python -m pyparallel doctor` prints what that costs and how to "
        "build it"
    )


def test_hidden_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for visible, why in (("", ": CUDA_VISIBLE_DEVICES is empty"), ("0", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        reason = _library.load_triton().unavailable_reason
        assert reason == f"not loaded: torch sees no GPU{why}"


def test_options_of_triton_are_known_on_amd(monkeypatch):
    from triton.backends.amd.compiler import HIPOptions

    monkeypatch.setattr(torch.version, "hip", "7.0")
    path = Path(__file__).parents[1] / "kernels/triton/_step.py"
    spec = importlib.util.spec_from_file_location("pyparallel.kernels._step_on_amd", path)
    step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(step)
    assert {"num_warps", "enable_fp_fusion"} == step.OPTIONS.keys()
    assert step.OPTIONS.keys() <= HIPOptions.__dataclass_fields__.keys()
