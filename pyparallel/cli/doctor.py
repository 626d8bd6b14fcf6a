"""A report of what is installed, and which implementation runs each op on each device."""

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterable

import torch

from .. import ops
from ..pipeline.simulation.event_loop import COMPILED

_COMPILERS = ("c++", "nvcc", "cmake", "ninja")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command has none."""


def report(arguments: argparse.Namespace) -> str:
    """Return the report, as text for a terminal or a bug report."""
    return "\n".join(
        [
            "versions",
            *_indent(_versions()),
            "compilers",
            *_indent(f"{name:<8} {_version_of_tool(name)}" for name in _COMPILERS),
            "libraries",
            *_indent(_libraries()),
            "ops",
            *_indent(line for op in ops.names() for line in _implementations(op)),
        ]
    )


def _versions() -> list[str]:
    packages = ("pyparallel-torch", "torch", "triton", "numpy")
    lines = [f"{'python':<16} {platform.python_version()}"]
    lines += [f"{name:<16} {_version_of_package(name)}" for name in packages]
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return [
        *lines,
        f"{'torch CUDA':<16} {torch.version.cuda or 'none'}",
        f"{'CPU':<16} {platform.machine()}, {capability}, {threads} threads",
        f"{'GPUs':<16} {', '.join(cards) or 'none'}",
    ]


def _version_of_package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _version_of_tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        return "not found"
    result = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if any(map(str.isdigit, line))]
    # nvcc prints its release on the last line but one, the others on the first.
    line = next((line for line in lines if "release" in line), lines[0] if lines else "?")
    return f"{line.strip()} ({path})"


def _libraries() -> Iterable[str]:
    for backends in ops.BACKENDS.values():
        for backend in backends:
            yield f"{backend!s:<42} {backend.unavailable_reason or 'loaded'}"
    loop = f"compiled event loop ({COMPILED.path.name})" if COMPILED.loop else "compiled event loop"
    yield f"{loop:<42} {COMPILED.unavailable_reason or 'loaded'}"


def _implementations(op: str) -> Iterable[str]:
    for device in ops.BACKENDS:
        implementation, slower_because = ops.implementation(op, device)
        reasons = "".join(f"; {backend} {why}" for backend, why in slower_because)
        yield f"{op:<14} {device:<5} {implementation}{reasons}"


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
