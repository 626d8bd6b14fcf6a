"""The CUDA kernels without a GPU: compiled by the C++ compiler, with threads as fibers.

This finds wrong indices, barriers and arithmetic, but no races between blocks (they run in
sequence), and does not measure speed.
"""

import ctypes
import fcntl
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emulated"


@functools.cache
def build() -> None:
    """Compile outdated files into BUILD."""
    assert not torch.cuda.is_available(), "with a GPU its own library serves"
    scripts = Path(sys.executable).parent
    torch_dir = Path(torch.__file__).parent
    source = ROOT / "tests" / "csrc" / "emulator"
    options = [f"-DTORCH_DIR={torch_dir}", f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}"]
    configure = [scripts / "cmake", "-S", source, "-B", BUILD, "-G", "Ninja", *options]
    with _alone():
        for command in (configure, [scripts / "cmake", "--build", BUILD, "--parallel"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def _alone() -> Iterator[None]:
    """Lock the build: tests run in several processes, of which one compiles."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with BUILD.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _load() -> None:
    """Register the kernels under the CUDA key, which CPU tensors do not have."""
    build()
    torch.ops.load_library(BUILD / "libpyparallel_emulated.so")


def emulated(op: str) -> Callable[..., Any]:
    """Return the CUDA implementation of an op, for tensors on the CPU."""
    _load()
    overload = getattr(torch.ops.pyparallel, op).default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return functools.partial(overload.redispatch, keys)


def count_launches() -> int:
    """Return the number of kernels that this process has launched."""
    return _count("emulated_launches")


def count_bytes() -> int:
    """Return how many bytes of aligned buffers, evict-first, this process's kernels have moved."""
    return _count("emulated_bytes")


def _count(function: str) -> int:
    _load()
    count = ctypes.CDLL(str(BUILD / "libpyparallel_emulated.so"))[function]
    count.restype = ctypes.c_int64
    return int(count())
