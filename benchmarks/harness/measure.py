"""Timing of the ops: providers take turns within one run, always beside a plain copy.

The times of a GPU are its own: it sleeps until the host has enqueued all calls. Where the host
takes longer than the longest sleep, the GPU would wait for it, so that provider has no row.
"""

import ctypes
import functools
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.harness.rows import Row, summary
from benchmarks.harness.turns import take_turns

FIELDS = [
    "op", "case", "device", "numel", "provider", "median_ms", "p20_ms", "p80_ms", "gb_per_s",
    "of_copy", "speedup_of_ours", "host_ms", "threads", "torch", "commit",
]  # fmt: skip

LONGEST_SLEEP = 0.02  # seconds that a GPU sleeps at most before the calls that are timed
CYCLES_PER_SECOND = 2e9  # of the fastest clock: with a slower one the GPU sleeps longer
NUM_TRIES = 3  # of a time, with longer sleeps: another process may hold the host up


class HostBoundError(RuntimeError):
    """The host took longer to enqueue calls than the GPU slept."""


class Time(NamedTuple):
    """Seconds of a call: of the device, and of the host until it has enqueued the call."""

    device: float
    host: float


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


def sweep(*kinds: tuple[Callable[..., Case], Sequence[tuple]]) -> Callable[..., Iterator[Case]]:
    """Return a function that yields the cases of an op on a device at some sizes.

    A kind is a function of the device, the size and further arguments, and a list of those.
    """

    def cases(device: str, sizes: list[int]) -> Iterator[Case]:
        for numel in sizes:
            for make, options in kinds:
                for arguments in options:
                    yield make(device, numel, *arguments)

    return cases


def beside(
    ours: Callable[[], object],
    torch_ops: Callable[[], object],
    compiled: Callable[[], object],
    name: str = "torch ops",
) -> list[Provider]:
    """Return ours beside torch's separate ops, under a name, and the compiled reference."""
    return [
        Provider("pyparallel", ours),
        Provider(name, torch_ops),
        Provider("torch.compile of reference", compiled),
    ]


def format_name(bits: int, format: str) -> str:
    return f"{format}{bits}" if format == "int" else format


def name_of(*kinds: torch.dtype) -> list[str]:
    return [str(kind).removeprefix("torch.") for kind in kinds]


def measure(case: Case, turns: int, longest_call: float = math.inf) -> list[Row]:
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


def _measure(case: Case, turns: int, longest_call: float) -> list[Row]:
    found, runs = dict[str, list[Time]](), dict[str, Callable[[], Time | None]]()
    refused: dict[str, HostBoundError] = {}

    def take_turn(provider: Provider, trial: Time) -> Time | None:
        if provider.name not in refused:
            try:
                return time_turn(provider.run, case.device, trial)
            except HostBoundError as error:
                refused[provider.name] = error
        return None

    for provider, trial in tried_out(case, longest_call):
        if trial.device > longest_call:
            found[f"{provider.name} (one call)"] = [trial]
            continue
        found[provider.name] = []
        runs[provider.name] = functools.partial(take_turn, provider, trial)
    found |= take_turns(runs, turns)
    ours, *_, copy = found
    for name, error in refused.items():
        if name in (ours, copy):
            raise error
        print(f"{case.op}, {case.name}, {case.numel:,}, {name}: refused: {error}")
        del found[name]
    of_ours, of_copy = (statistics.median(each.device for each in found[x]) for x in (ours, copy))
    copy_rate = 8 * case.numel / of_copy
    return [
        _row(case, name, times, of_ours, copy_rate, is_copy=name == copy)
        for name, times in found.items()
    ]


def tried_out(case: Case, longest_call: float) -> Iterator[tuple[Provider, Time]]:
    """Yield the providers, the copy last, with the time of their second call (after compiling).

    A peer that fails is printed and left out. On the CPU without a longest call none is called.
    """
    ours, *peers, copy = *case.providers, copy_provider(case)
    for each in (ours, *peers, copy):
        if case.device == "cpu" and longest_call == math.inf:
            yield each, Time(0.0, 0.0)
            continue
        try:
            provider = replayed(each, case)
            provider.run()
            trial = time_once(provider.run, case.device)
        except Exception as error:
            if each not in peers:
                raise
            what = f"{type(error).__name__}: {error}"
            print(f"{case.op}, {case.name}, {case.numel:,}, {each.name}: left out: {what}")
            continue
        yield provider, trial


def replayed(provider: Provider, case: Case) -> Provider:
    """Return small cases on a GPU as graph replays, as kernels follow each other faster in one."""
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


def time_turn(run: Callable[[], object], device: str, trial: Time) -> Time:
    """Return the mean of several calls on a GPU, else the time of one.

    There are as many as the GPU's clock can resolve, 2 ms' worth, and as the host enqueues in half
    of the longest sleep. The GPU sleeps twice as long as the host should take.
    """
    if device == "cpu":
        return time_once(run, device)
    enqueued = LONGEST_SLEEP / 2 / max(trial.host, 1e-6)
    repeats = max(1, min(100, 1 + int(2e-3 / max(trial.device, 1e-6)), int(enqueued)))
    return time_once(run, device, repeats, 2 * repeats * trial.host + 1e-4)


def time_once(
    run: Callable[[], object],
    device: str,
    repeats: int = 1,
    sleep: float = LONGEST_SLEEP,
    tries: int = NUM_TRIES,
) -> Time:
    """Return the time of one call, the mean of several.

    A GPU sleeps for some seconds until the host has enqueued them, and longer in each further try.
    A HostBoundError if the host has not by then, as the GPU would wait for it.
    """
    start = time.perf_counter()
    if device == "cpu":
        for _ in range(repeats):
            run()
        seconds = (time.perf_counter() - start) / repeats
        return Time(seconds, seconds)
    for number in range(1, tries + 1):
        asleep, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start = time.perf_counter()
        asleep.record()
        torch.cuda._sleep(int(min(number * sleep, LONGEST_SLEEP) * CYCLES_PER_SECOND))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        host = time.perf_counter() - start
        end.synchronize()  # not with what runs beside it on other streams
        slept = asleep.elapsed_time(begin) / 1e3
        if host <= slept:
            return Time(begin.elapsed_time(end) / 1e3 / repeats, host / repeats)
    raise HostBoundError(
        f"the host took {host * 1e3:.3f} ms to enqueue {repeats} calls, and the GPU slept for "
        f"{slept * 1e3:.3f}: it would have waited for the host"
    )


def compile_reference(
    reference: Callable[..., object], device: str, *arguments: object
) -> Callable[..., object]:
    """Apply ``torch.compile``, for one size, and give the function these arguments.

    On a GPU, where time is scarce, the second size compiles for all others too.
    """
    compiled = torch.compile(reference, dynamic=None if device == "cuda" else False)
    return functools.partial(compiled, *arguments)


def _row(
    case: Case, name: str, times: list[Time], ours: float, copy_rate: float, *, is_copy: bool
) -> Row:
    median, host = (statistics.median(each) for each in zip(*times, strict=True))
    num_bytes = 8 * case.numel if is_copy else case.num_bytes
    row = {
        "op": case.op,
        "case": case.name,
        "device": case.device,
        "numel": case.numel,
        "provider": name,
        **summary([each.device for each in times], digits=4),
        "gb_per_s": f"{num_bytes / median / 1e9:.2f}",
        "of_copy": f"{num_bytes / median / copy_rate:.3f}",
        "speedup_of_ours": f"{median / ours:.2f}",
        "host_ms": f"{host * 1e3:.4f}" if case.device == "cuda" else "",
        "threads": torch.get_num_threads(),
    }
    return {field: row[field] for field in FIELDS}


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
