"""Timing harness of the ops: providers alternate within one run, always including a plain copy.

These machines drift by tens of percent between runs, so only ratios within a run are meaningful:
every provider runs once per turn, in random order, and medians are compared.
"""

import csv
import ctypes
import functools
import math
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parents[1] / "results"
FIELDS = [
    "op", "case", "device", "numel", "provider", "median_ms", "p20_ms", "p80_ms", "gb_per_s",
    "of_copy", "speedup_of_ours", "threads", "torch", "commit",
]  # fmt: skip


@dataclass(frozen=True)
class Provider:
    """One implementation of a case; what works on the host is not captured in a CUDA graph."""

    name: str
    run: Callable[[], object]
    captured: bool = True


@dataclass(frozen=True)
class Case:
    """A comparison: the first provider is ours; ``num_bytes`` is the least the op must move.

    ``threads`` is torch's number of threads on the CPU; None: as it is.
    """

    op: str
    name: str
    numel: int
    num_bytes: int
    providers: Sequence[Provider]
    device: str = "cpu"
    threads: int | None = None


def measure(case: Case, turns: int, longest_call: float = math.inf) -> list[dict[str, object]]:
    """Return table rows for ours, its peers and the copy, all timed in the same turns.

    A provider whose second call takes more than ``longest_call`` seconds takes no further turn: its
    row has that call's time, and ``(one call)`` in its name.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    try:
        return _measure(case, turns, longest_call)
    finally:
        torch.set_num_threads(threads)


def _measure(case: Case, turns: int, longest_call: float) -> list[dict[str, object]]:
    providers, seconds, repeats = [], {}, {}
    for provider, second in tried_out(case, longest_call):
        if second > longest_call:
            seconds[f"{provider.name} (one call)"] = [second]
            continue
        providers.append(provider)
        seconds[provider.name] = []
        # As many runs as the clock can resolve: 2 ms' worth on a GPU.
        on_gpu = min(100, 1 + int(2e-3 / max(second, 1e-6)))
        repeats[provider.name] = on_gpu if case.device == "cuda" else 1
    order = random.Random(0)
    for turn in range(turns + 3):
        for provider in order.sample(providers, len(providers)):
            elapsed = time_once(provider.run, case.device, repeats[provider.name])
            if turn >= 3:  # the first turns warm up
                seconds[provider.name].append(elapsed)
    names = list(seconds)
    ours = statistics.median(seconds[names[0]])
    copy_rate = 8 * case.numel / statistics.median(seconds[names[-1]])
    return [_row(case, name, times, ours, copy_rate, names[-1]) for name, times in seconds.items()]


def tried_out(case: Case, longest_call: float) -> Iterator[tuple[Provider, float]]:
    """Yield the providers, the copy last, with the seconds of their second call (after compiling).

    A peer that fails is printed and left out. On the CPU without a longest call none is called.
    """
    ours, *peers, copy = *case.providers, copy_provider(case)
    for each in (ours, *peers, copy):
        if case.device == "cpu" and longest_call == math.inf:
            yield each, 0.0
            continue
        try:
            provider = replayed(each, case)
            _, second = (time_once(provider.run, case.device) for _ in range(2))
        except Exception as error:
            if each not in peers:
                raise
            what = f"{type(error).__name__}: {error}"
            print(f"{case.op}, {case.name}, {case.numel:,}, {each.name}: left out: {what}")
            continue
        yield provider, second


def replayed(provider: Provider, case: Case) -> Provider:
    """Return small cases on a GPU as graph replays: launch overhead would dominate."""
    if case.device != "cuda" or case.numel > 2**20:
        return provider
    if not provider.captured:
        return Provider(f"{provider.name} (launched)", provider.run)
    for _ in range(3):  # allocate and compile before the capture
        provider.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            provider.run()
    except RuntimeError as error:
        print(f"{case.op}, {provider.name}: not captured, launched instead: {error}")
        return Provider(f"{provider.name} (launched)", provider.run)
    return Provider(f"{provider.name} (graph)", graph.replay)


def time_once(run: Callable[[], object], device: str, repeats: int = 1) -> float:
    """Return the seconds of one call (the mean of several), including the device's work."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def compile_reference(reference: Callable[..., object], device: str) -> Callable[..., object]:
    """Apply ``torch.compile``, for one size.

    On a GPU, where time is scarce, the second size compiles for all others too.
    """
    return torch.compile(reference, dynamic=None if device == "cuda" else False)


def _row(
    case: Case, name: str, times: list[float], ours: float, copy_rate: float, copy_name: str
) -> dict[str, object]:
    median = statistics.median(times)
    tenths = _tenths(times)
    num_bytes = 8 * case.numel if name == copy_name else case.num_bytes
    return {
        "op": case.op,
        "case": case.name,
        "device": case.device,
        "numel": case.numel,
        "provider": name,
        "median_ms": f"{median * 1e3:.4f}",
        "p20_ms": f"{tenths[1] * 1e3:.4f}",
        "p80_ms": f"{tenths[7] * 1e3:.4f}",
        "gb_per_s": f"{num_bytes / median / 1e9:.2f}",
        "of_copy": f"{num_bytes / median / copy_rate:.3f}",
        "speedup_of_ours": f"{median / ours:.2f}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def _tenths(times: Sequence[float]) -> list[float]:
    if len(times) == 1:
        return [times[0]] * 9
    return statistics.quantiles(times, n=10, method="inclusive")


def copy_provider(case: Case) -> Provider:
    """Return the upper bound: a non-temporal copy on the CPU, ``Tensor.copy_`` on a GPU."""
    source = torch.randn(case.numel, device=case.device)
    target = torch.empty_like(source)
    if case.device == "cuda":
        return Provider("copy", lambda: target.copy_(source))
    stream_copy = build_stream_copy()
    return Provider(
        "copy (non-temporal)",
        lambda: stream_copy(source.data_ptr(), target.data_ptr(), source.numel()),
    )


@functools.cache
def build_stream_copy() -> Callable[[int, int, int], None]:
    """Compile stream_copy.cpp; it copies with torch's number of threads."""
    source = Path(__file__).parent / "stream_copy.cpp"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stream_copy.so"
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["c++", *flags, source, "-o", library], check=True)
        function = ctypes.CDLL(str(library)).stream_copy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    function.restype = None
    return lambda source, target, numel: function(source, target, numel, torch.get_num_threads())


def print_header() -> None:
    """Print the names of the columns; ``of copy`` is relative to the copy of the same run."""
    print(f"{'op':<13} {'case':<32} {'numel':>10} {'provider':<32} "
          f"{'ms':>9} {'p20..p80':>17} {'GB/s':>7} {'of copy':>8} {'ours is':>8}")  # fmt: skip


def print_rows(rows: Sequence[dict[str, object]]) -> None:
    """Print lines of a readable table."""
    for row in rows:
        spread = f"{float(row['p20_ms']):.2f}..{float(row['p80_ms']):.2f}"
        print(f"{row['op']:<13} {row['case']:<32} {row['numel']:>10,} {row['provider']:<32} "
              f"{float(row['median_ms']):>9.3f} {spread:>17} {row['gb_per_s']:>7} "
              f"{row['of_copy']:>8} {row['speedup_of_ours']:>7}x", flush=True)  # fmt: skip


def write_rows(
    rows: Sequence[dict[str, object]],
    path: Path | None = None,
    fields: Sequence[str] = FIELDS,
    key: Sequence[str] | None = None,
) -> Path:
    """Replace this machine's rows of what was measured, and keep the others.

    Rows are replaced whose ``key`` (names of fields; default: the first field) was measured.
    """
    path = path or RESULTS / f"{machine()}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    key = key or fields[:1]
    measured = {tuple(str(row[field]) for field in key) for row in rows}
    kept = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [
                row
                for row in csv.DictReader(file)
                if tuple(row[field] for field in key) not in measured
            ]
    whole = path.with_name(f"{path.name}.part")  # a run that is killed leaves the rows it had
    with whole.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])
    whole.replace(path)
    return path


def summary(times: Sequence[float]) -> dict[str, object]:
    """Return median and spread in ms of repeated times in s, with torch version and commit."""
    tenths = _tenths(times)
    return {
        "median_ms": f"{statistics.median(times) * 1e3:.3f}",
        "p20_ms": f"{tenths[1] * 1e3:.3f}",
        "p80_ms": f"{tenths[7] * 1e3:.3f}",
        "torch": torch.__version__,
        "commit": commit(),
    }


def machine() -> str:
    """Return a name for the results file: the processor or the GPU."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2] for line in lines if line.startswith("model name")]
        name = f"{models[0] if models else platform.machine()} {torch.get_num_threads()} threads"
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


@functools.cache
def commit() -> str:
    """Return the measured commit, marked if the working tree differs from it.

    A tree that was copied without its history can name it in ``PYPARALLEL_COMMIT``.
    """
    if named := os.environ.get("PYPARALLEL_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    root = Path(__file__).parent
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"
