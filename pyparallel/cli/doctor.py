"""A report of what is installed, what runs each op, and what is missing and costs how much."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from .. import ops
from ..comm import PeerError
from ..planning.pipelines.event_loop import COMPILED, Compiled
from ..training.arguments import require
from .links import report_links

EXAMPLE = "python -m pyparallel doctor"

_TOOLS = ("c++", "nvcc", "cmake", "ninja")
_PACKAGES = ("torch", "triton", "numpy")
_PLAIN = "PyTorch"
_EVENT_LOOP = "compiled event loop"
_LAZY = "{}: pipelines send new shapes through the host, with EAGER over NCCL"
# Medians of speedup_of_ours over the rows "torch ops" in benchmarks/results/amd-epyc-2-threads.csv;
# the references, which run without the library, are no faster than torch's separate ops there.
SPEEDUPS = {"quantize": 12.2, "pack_signs": 10.6, "mix_quantized": 4.2}
_HOW_TO_BUILD = """\
to build: get pyparallel's repository and a C++ compiler, and run there
  pip install setuptools cmake ninja pybind11
  pip install --no-build-isolation ."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--links", action="store_true", help="measure all pairs of ranks instead, under torchrun"
    )
    parser.add_argument("--out", type=Path, help="TOML file of these links, for simulate")


def report(arguments: argparse.Namespace) -> str:
    """Return the report, as text for a terminal or a bug report."""
    try:
        require(arguments.links or arguments.out is None, "--out needs --links", arguments.out)
        if arguments.links:
            return report_links(arguments.out)
    except (ValueError, ConnectionError, PeerError) as error:
        raise SystemExit(f"doctor: {error}") from error
    backends = (each for backends in ops.BACKENDS.values() for each in backends)
    libraries: dict[str, ops.Backend | Compiled] = {each.name: each for each in backends}
    libraries[_EVENT_LOOP] = COMPILED
    missing = {name: why for name, each in libraries.items() if (why := each.unavailable_reason)}
    reasons = {reason: f"[{i}]" for i, reason in enumerate(dict.fromkeys(missing.values()), 1)}
    numbers = {name: reasons[reason] for name, reason in missing.items()}
    files = {name: each.path.name if each.path else "loaded" for name, each in libraries.items()}
    files |= {name: f"missing {number}" for name, number in numbers.items()}
    lines = [
        "versions",
        *_columns(_versions()),
        *(["devices", *_columns(devices)] if (devices := list(_devices())) else []),
        "tools",
        *_columns((name, _version_of_tool(name)) for name in _TOOLS),
        "libraries",
        *_columns(files.items()),
        *_columns([("ops", *ops.BACKENDS), *(_row(op, numbers) for op in ops.names())], indent=""),
    ]
    if missing:
        names_of: dict[str, list[str]] = {}
        for name, number in numbers.items():
            names_of.setdefault(_cost(name), []).append(f"{name} {number}")
        lines.append("missing")
        lines += [f"  {', '.join(names)}: {cost}" for cost, names in names_of.items()]
        lines += [f"  {number} {reason}" for reason, number in reasons.items()]
    on_gpus = ["compiled CUDA"] if torch.cuda.is_available() else []
    wanted = {"compiled C++", _EVENT_LOOP, *on_gpus}
    if not wanted.isdisjoint(missing):
        lines.append(_HOW_TO_BUILD)
    return "\n".join(lines)


def _cost(name: str) -> str:
    if name == "compiled C++":
        times = ", ".join(f"{times:.0f} times ({op})" for op, times in SPEEDUPS.items())
        return f"CPU ops run in plain PyTorch and take, by the median, at least {times} as long"
    if name == _EVENT_LOOP:
        return "schedules are simulated in plain Python, slower; training is the same"
    if not torch.cuda.is_available():
        return "no cost without a GPU"
    kernels = sorted(set().union(*(backend.ops for backend in ops.BACKENDS["cuda"])))
    if name == "compiled CUDA" and kernels:
        return f"{', '.join(kernels)} run in Triton on GPUs, other ops in {_PLAIN}, in more passes"
    install = "; pip install triton" if name == "Triton" else ""
    return f"GPU ops run as in the table{install}"


def _versions() -> Iterator[tuple[str, str]]:
    package = Path(__file__).parent.parent
    # Not of importlib.metadata: another copy of the package may be the installed one.
    yield "pyparallel", f"{sys.modules[package.name].__version__} ({package})"
    yield "python", platform.python_version()
    yield from ((name, _version_of_package(name)) for name in _PACKAGES)
    yield "torch CUDA", torch.version.cuda or "none"
    capability = torch.backends.cpu.get_cpu_capability()
    yield "CPU", f"{platform.machine()}, {capability}, {torch.get_num_threads()} threads"
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(cards) or "none"


def _devices() -> Iterator[tuple[str, str]]:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        yield str(device), _run_on(device)
    if torch.cuda.device_count():
        loading = os.environ.get("CUDA_MODULE_LOADING", "LAZY")
        yield "CUDA_MODULE_LOADING", loading if loading == "EAGER" else _LAZY.format(loading)


def _run_on(device: torch.device) -> str:
    """Return what running a kernel on the device gives: the host waits for its result."""
    try:
        z, mass = torch.zeros(1, device=device), torch.ones((), dtype=torch.float64, device=device)
        ops.mix_(z, mass, [torch.ones_like(z)], mass.reshape(1).clone())
        result = z.item()
    except Exception as error:  # a driver, a library or a kernel that fails in any way
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"mix_ fails: {what}"
    return "mix_ runs" if result == 0.5 else f"mix_ gives {result}, not 0.5"


def _version_of_package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _version_of_tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        return "not found"
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, check=False, timeout=20, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {type(error).__name__} ({path})"
    lines = [line for line in done.stdout.splitlines() if any(map(str.isdigit, line))]
    # nvcc prints its release on the last line but one, the others on the first.
    line = next((line for line in lines if "release" in line), lines[0] if lines else "?")
    return f"{line.strip()} ({path})"


def _row(op: str, numbers: dict[str, str]) -> tuple[str, ...]:
    cells = []
    for device, backends in ops.BACKENDS.items():
        _, slower_because = ops.implementation(op, device)
        runs = next((each.name for each in backends if op in each.ops), _PLAIN)
        why = dict.fromkeys(numbers[name] for name, _ in slower_because if name in numbers)
        cells.append(" ".join([runs, *why]))
    return f"  {op}", *cells


def _columns(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [(indent + "  ".join(map(str.ljust, row, widths))).rstrip() for row in table]
