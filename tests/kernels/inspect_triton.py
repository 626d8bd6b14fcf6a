"""Inspection of GPU code without a GPU: compiled Triton kernels and their machine code.

pytest runs under TRITON_INTERPRET, where ``@triton.jit`` functions cannot be compiled; so separate
processes compile. They are slow to start, so all tests of a session share them. They import this
module first, so it must not import Triton itself.
"""

import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOOLS = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# Four blocks of 512 threads, a full multiprocessor, would leave 32; two saturate the memory.
MAX_REGISTERS = 64
REGISTERS = 2**16  # of a multiprocessor
BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2}


@dataclass(frozen=True)
class MachineCode:
    """The compiler's report on one kernel, and the bytes a thread moves by 16-byte accesses."""

    architecture: str
    name: str
    registers: int
    stack: int
    local: int
    wide_load_bytes: int
    wide_store_bytes: int


def read_machine_code(path: Path) -> list[MachineCode]:
    """Return every kernel in a library, or in a cubin (which names no architecture)."""
    is_library = path.suffix == ".so"
    names = set(re.findall(r"\bsm_\d+", _run([TOOLS / "cuobjdump", "--list-elf", path])))
    only = [["-arch", name] for name in sorted(names)] if is_library else [[]]
    with ThreadPoolExecutor() as pool:  # the disassembler is slow and single-threaded
        parts = list(pool.map(lambda which: _list_kernels(["-sass", *which], path), only))
    sass = {key: lines for part in parts for key, lines in part.items()}
    usage = _list_kernels(["-res-usage"], path)
    assert sass.keys() == usage.keys() != set()
    return [
        MachineCode(
            *key,
            *(int(number) for number in re.findall(r"\b(?:REG|STACK|LOCAL):(\d+)", usage[key])),
            _wide_bytes("LDG", sass[key]),
            _wide_bytes("STG", sass[key]),
        )
        for key in sass
    ]


TOKENS = re.compile(r"\b(LDG|STG|REG)\b")  # searched in the listings


def _list_kernels(options: list[str], path: Path) -> dict[tuple[str, str], str]:
    """Return the relevant lines of a cuobjdump listing, by architecture and kernel."""
    listing = _run([TOOLS / "cuobjdump", *options, path])
    parts: dict[tuple[str, str], list[str]] = {}
    architecture, lines = "", []
    for line in listing.splitlines():
        if TOKENS.search(line):
            lines.append(line)
        elif line.startswith("arch = "):
            architecture, lines = line.removeprefix("arch = "), []
        elif match := re.match(r"\s*Function ?:? (\w+):?$", line):
            lines = parts[architecture, match[1]] = []
    return {key: "\n".join(lines) for key, lines in parts.items()}


def _wide_bytes(instruction: str, sass: str) -> int:
    return sum(int(bits) // 8 for bits in re.findall(rf"\b{instruction}\.\S*\b(128|256)\b", sass))


def _run(command: list[str | Path], **options: Any) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert process.returncode == 0, process.stderr
    return process.stdout


def find_waste(code: MachineCode) -> list[str]:
    """Return a message for each excess of registers or spills."""
    found = []
    if code.registers > MAX_REGISTERS:
        found.append(f"{code.registers} registers, more than {MAX_REGISTERS}")
    if code.stack or code.local:
        found.append(f"spills: {code.stack} bytes of stack, {code.local} of local memory")
    return found


@dataclass(frozen=True)
class Compilation:
    """A kernel with the argument types of a launch.

    Args:
        kernel: its name in ``module``.
        module: the file in kernels/.
        signature: Triton's type of each argument; a tuple for a tuple of tensors.
        constants: the constexpr arguments, BLOCK among them where buffers are walked.
        options: the launcher's.
        reads, writes: the arguments that are walked in blocks, by 16-byte accesses if aligned.
        narrow: those that are walked by smaller ones, because a thread has too few elements.
    """

    kernel: str
    module: str
    signature: dict[str, Any]
    constants: dict[str, int | None]
    options: dict[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    aligned: bool = True

    def __str__(self) -> str:
        types = [str(self.signature[name]) for name in self.reads]
        return f"{self.kernel}({', '.join(types)})"

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * int(self.options.get("num_warps", 4))

    def bytes_per_thread(self, names: Iterable[str]) -> int:
        """Return the bytes of these arguments that one thread of a full block moves."""
        types = [kind for name in names for kind in _leaves(self.signature[name])]
        per_element = sum(BYTES[kind] for kind in types)
        return (self.constants.get("BLOCK") or 0) * per_element // self.threads


def _leaves(kind: str | tuple[str, ...]) -> tuple[str, ...]:
    return (kind,) if isinstance(kind, str) else tuple(kind)


def find_problems_of(pairs: Iterable[tuple[Compilation, str]]) -> list[str]:
    """Compile for the architectures; return a message per unmet requirement."""
    jobs = list(pairs)
    return [
        f"{compilation} on {architecture}: {problem}"
        for (compilation, architecture), code in zip(
            jobs, _compilers().map(_compile, *zip(*jobs, strict=True)), strict=True
        )
        for problem in [
            *find_waste(code),
            *_find_lone_block(compilation, code),
            *_find_narrow_accesses(compilation, code),
        ]
    ]


def _find_lone_block(compilation: Compilation, code: MachineCode) -> list[str]:
    """Return a message if a multiprocessor has room for one block only, which waits alone."""
    taken = compilation.threads * (-(-code.registers // 8) * 8)
    if taken > REGISTERS // 2:
        return [f"{taken} of {REGISTERS} registers for one block"]
    return []


def _find_narrow_accesses(compilation: Compilation, code: MachineCode) -> list[str]:
    found = []
    for verb, names, wide in [
        ("loads", compilation.reads, code.wide_load_bytes),
        ("stores", compilation.writes, code.wide_store_bytes),
    ]:
        wanted = compilation.bytes_per_thread(names)
        if wide < wanted:
            found.append(f"{wide} of the {wanted} bytes a thread {verb} move 16 at a time")
    return found


@functools.cache
def _compilers() -> ProcessPoolExecutor:
    # pytest-xdist's workers have a pool each.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    processes = max(1, min(4, (os.cpu_count() or 1) // workers))
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, initializer=_leave_the_interpreter)


def _leave_the_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(compilation: Compilation, architecture: str) -> MachineCode:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"pyparallel.kernels.{compilation.module}")
    kernel = getattr(module, compilation.kernel)
    place = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    signature = compilation.signature | dict.fromkeys(compilation.constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: signature[name] for name in kernel.arg_names},
        constexprs={place[name]: value for name, value in compilation.constants.items()},
        attrs={key: [["tt.divisibility", 16]] for key in _aligned_places(compilation, place)},
    )
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options=compilation.options)
    return _read_cubin(compiled.asm["cubin"], architecture)


def _read_cubin(cubin: bytes, architecture: str) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        (code,) = read_machine_code(Path(file.name))
    return replace(code, architecture=architecture)


def _aligned_places(
    compilation: Compilation, place: dict[str, tuple[int]]
) -> Iterator[tuple[int, ...]]:
    if not compilation.aligned:
        return
    for name in {*compilation.reads, *compilation.writes, *compilation.narrow}:
        kind = compilation.signature[name]
        if isinstance(kind, str):
            yield place[name]
        else:
            yield from ((*place[name], index) for index in range(len(kind)))
