"""The operator library: schemas with references, and the backends with faster kernels."""

import ctypes
import importlib
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ._checks import are_apart, by_index, check_written, has_memory

_LIBRARY = torch.library.Library("pyparallel", "DEF")
_NAMES: list[str] = []
_ARGUMENTS: dict[Callable[..., Any], Sequence[Any]] = {}  # of the schemas, by unchecked op
_PUBLIC_NAMES = {"grads": "grad"}
_PACKAGE = Path(__file__).parent.parent
_NATIVE_FOLDER = _PACKAGE.resolve() / "_native"


def define(schema: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Define an op by its schema; the reference runs on every device without a faster kernel.

    Return the op, for callers that have checked the arguments: see ``_unchecked``.
    """
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    overload = getattr(torch.ops.pyparallel, name).default
    increment = _increment_versions(overload)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    _LIBRARY.impl(
        name, _counting_versions(overload, increment), "ADInplaceOrView", with_keyset=True
    )
    _NAMES.append(name)
    unchecked = _unchecked(overload, increment)
    _ARGUMENTS[unchecked] = overload._schema.arguments
    return unchecked


def _increment_versions(overload: torch._ops.OpOverload) -> Callable[[Sequence[Any]], None]:
    """Return a function that increments the version counters of written tensors, for autograd."""
    arguments = overload._schema.arguments
    places = [i for i, argument in enumerate(arguments) if argument.is_write]
    lists = [i for i in places if arguments[i].type.kind() == "ListType"]
    single = [i for i in places if i not in lists]

    def increment(values: Sequence[Any]) -> None:
        written = [value for i in single if (value := values[i]) is not None]
        for i in lists:
            written += values[i]
        torch.autograd.graph.increment_version(written)

    return increment


def _counting_versions(
    overload: torch._ops.OpOverload, increment: Callable[[Sequence[Any]], None]
) -> Callable[..., Any]:
    """Return the kernel that counts the versions of written tensors."""

    def run(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        increment(arguments)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)

    return run


def _unchecked(
    overload: torch._ops.OpOverload, increment: Callable[[Sequence[Any]], None]
) -> Callable[..., Any]:
    """Return the overload for positional arguments, without the autograd keys of the dispatcher.

    The kernel under ADInplaceOrView is Python, for which the dispatcher boxes all arguments twice,
    which costs as much as a small op. Counting versions before the call does the same.
    """

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload(*arguments)
        increment(arguments)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return run(*arguments)

    run = overload._op  # what calling an overload does, without one more function of Python
    return call


def checked(unchecked: Callable[..., Any], *, in_place: bool = False) -> Callable[..., Any]:
    """Return the op with checks of the memory that it writes, for the public functions.

    They are those of ``check_written``; ``in_place``: an output may be an input, entry for entry.
    """
    places = [
        (place, argument)
        for place, argument in enumerate(_ARGUMENTS[unchecked])
        if "Tensor" in str(argument.type)
    ]

    def named(arguments: Sequence[Any]) -> list[tuple[str, torch.Tensor, bool]]:
        found = []
        for place, argument in places:
            value, name = arguments[place], _PUBLIC_NAMES.get(argument.name, argument.name)
            one = {} if value is None else {name: value}
            tensors = one if isinstance(value, torch.Tensor | None) else by_index(name, value)
            found += [(key, tensor, argument.is_write) for key, tensor in tensors.items()]
        return found

    lists = [place for place, argument in places if "List[" in str(argument.type)]
    single = [place for place, _ in places if place not in lists]
    written_lists = [place for place, argument in places if argument.is_write and place in lists]
    written = [place for place, argument in places if argument.is_write and place in single]

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return unchecked(*arguments)
        tensors = [value for place in single if (value := arguments[place]) is not None]
        for place in lists:
            tensors += arguments[place]
        writes = [value for place in written if (value := arguments[place]) is not None]
        for place in written_lists:
            writes += arguments[place]
        is_plain = True
        for tensor in writes:
            if tensor.requires_grad or tensor.is_inference():
                is_plain = False
        if tensors and has_memory(tensors[0]) and not (is_plain and are_apart(tensors)):
            check_written(named(arguments), in_place)
        return unchecked(*arguments)

    return call


def names() -> tuple[str, ...]:
    """Return the names of all ops, in the order of their definition."""
    return tuple(_NAMES)


@dataclass(frozen=True)
class Backend:
    """A set of faster kernels: the ops it implements, or the reason why it is not loaded."""

    name: str
    path: Path | None = None
    unavailable_reason: str | None = None
    ops: frozenset[str] = frozenset()

    def __str__(self) -> str:
        where = f" ({self.path.name})" if self.path else ""
        return self.name + where


def load_native(device: str) -> Backend:
    """Load the compiled library of a device ("cpu" or "cuda") if it was built and can run here."""
    name = {"cpu": "compiled C++", "cuda": "compiled CUDA"}[device]
    path = _NATIVE_FOLDER / f"libpyparallel_{device}.so"
    if not path.exists():
        outcome = build_outcome(_NATIVE_FOLDER, device)
        gone = f"missing, although it was {outcome}: install again"
        return Backend(name, unavailable_reason=gone if outcome.startswith("built") else outcome)
    reason = _unsupported_reason(device)
    if reason:
        return Backend(name, path, reason)
    before = _served(device)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return Backend(name, path, f"built, but it does not load: {error}")
    return Backend(name, path, ops=_served(device) - before)


def load_triton() -> Backend:
    """Register the Triton kernels if a GPU is available."""
    if not torch.cuda.is_available():
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        why = ": CUDA_VISIBLE_DEVICES is empty" if is_hidden else ""
        return Backend("Triton", unavailable_reason=f"not loaded: torch sees no GPU{why}")
    before = _served("cuda")
    try:
        # A dynamic import, because setup.py maps the folder into the package.
        importlib.import_module("pyparallel.kernels")
    except Exception as error:  # a Triton that does not fit this torch fails in any way
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Backend("Triton", unavailable_reason=f"not loaded: triton does not import ({what})")
    return Backend("Triton", ops=_served("cuda") - before)


def warn_of_slower_ops(backends: dict[str, tuple[Backend, ...]]) -> None:
    """Warn if CPU ops run without their library, or GPU ops without one that was built."""
    cpu, cuda = backends["cpu"][0], backends["cuda"][0]
    text = (
        "pyparallel runs its {} ops in {}, which is slower: the compiled library is {}; "
        "`python -m pyparallel doctor` prints what that costs and how to build it"
    )
    if cpu.unavailable_reason:
        _warn_importer(text.format("CPU", "plain PyTorch", cpu.unavailable_reason))
    if cuda.unavailable_reason and cuda.path and torch.cuda.is_available():
        _warn_importer(text.format("GPU", "Triton and plain PyTorch", cuda.unavailable_reason))


def _warn_importer(text: str) -> None:
    """Warn at the line that imports the package; not under ``python -m pyparallel``."""
    package, imports = f"{_PACKAGE}{os.sep}", (f"{Path(importlib.__file__).parent}", "<frozen")
    importer = sys._getframe()
    frame = importer.f_back
    while frame is not None and importer.f_code.co_filename.startswith(package):
        if not frame.f_code.co_filename.startswith(imports):
            importer = frame
        frame = frame.f_back
    path, names = importer.f_code.co_filename, importer.f_globals
    if not path.startswith(package):
        line, registry = importer.f_lineno, names.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, RuntimeWarning, path, line, names.get("__name__"), registry)


def _served(device: str) -> frozenset[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(op for op in _NAMES if has_kernel(f"pyparallel::{op}", device.upper()))


def build_outcome(folder: Path, name: str) -> str:
    """Return what became of a library in the build that filled a folder."""
    report = folder / "build.json"
    if not report.exists():
        return "not built: the package is used without being installed"
    return str(json.loads(report.read_text()).get(name, "not built"))


def _ask_driver() -> tuple[int, list[int]]:
    """Return the driver's CUDA, as 13020, and visible cards' capabilities, as 86; else 0, []."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, []

    def ask(function: str, *arguments: int) -> int:
        number = ctypes.c_int(0)
        getattr(cuda, function)(ctypes.byref(number), *arguments)
        return number.value

    # With this variable torch promises that CUDA still works in processes forked after the import.
    starts = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1" and cuda.cuInit(0) == 0
    cards = range(ask("cuDeviceGetCount") if starts else 0)
    major, minor = (partial(ask, "cuDeviceGetAttribute", number) for number in (75, 76))
    return ask("cuDriverGetVersion"), [10 * major(card) + minor(card) for card in cards]


def _unsupported_reason(device: str) -> str | None:
    if device == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        if platform.machine() == "x86_64" and capability not in {"AVX2", "AVX512"}:
            return f"built for AVX2, which this processor lacks (torch reports {capability})"
        return None
    if not torch.version.cuda:
        return "built, but not loaded: this torch has no CUDA"
    driver, cards = _ask_driver()
    built = re.search(r"nvcc (\d+)\S* for (.*)", build_outcome(_NATIVE_FOLDER, device))
    if built and 0 < driver < 1000 * int(built[1]):
        return (
            f"built with CUDA {built[1]}, which this driver for CUDA {driver // 1000}."
            f"{driver % 1000 // 10} cannot run: update the driver"
        )
    architectures = built[2] if built else ""
    codes = re.findall(r"(\d+)[a-z]*(\S*)", architectures)
    for index, card in enumerate(cards if codes else ()):
        # Machine code runs on later cards of its generation; PTX, which "real" leaves out, on all.
        oldest = [int(n) for n, kind in codes if kind != "-real" or int(n) // 10 == card // 10]
        if card < min(oldest, default=card + 1):
            return (
                f"built for {architectures} and not for cuda:{index} of compute capability "
                f"{card / 10}: build on this machine, for 8.0 or newer, or leave that card out of "
                "CUDA_VISIBLE_DEVICES"
            )
    return None
