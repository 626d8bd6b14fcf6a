"""GPU code without a GPU: compiles Triton kernels, and reads machine code with Triton's tools.

pytest runs under TRITON_INTERPRET, where ``@triton.jit`` gives functions that cannot be compiled;
so this module runs itself in a process without it (requests and reports travel as JSON).
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# Four blocks of 512 threads, a whole multiprocessor, would leave 32; two are enough to stream.
MAX_REGISTERS = 64
BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "*i8": 1, "*u8": 1, "*i32": 4, "*i64": 8}


@dataclass(frozen=True)
class MachineCode:
    """What the compiler reports of one kernel, and how many bytes a thread moves 16 at a time."""

    architecture: str
    name: str
    registers: int
    stack: int
    local: int
    wide_load_bytes: int
    wide_store_bytes: int


def read_machine_code(path: Path) -> list[MachineCode]:
    """Every kernel in a library that embeds some, or in a cubin (which names no architecture)."""
    sass, usage = _by_function("-sass", path), _by_function("-res-usage", path)
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


def _by_function(what: str, path: Path) -> dict[tuple[str, str], str]:
    """The parts of one of cuobjdump's listings, by architecture and kernel."""
    listing = _run([TOOLS / "cuobjdump", what, path])
    parts, architecture, name = {}, "", None
    for line in listing.splitlines():
        if line.startswith("arch = "):
            architecture, name = line.removeprefix("arch = "), None
        elif match := re.match(r"\s*Function ?:? (\w+):?$", line):
            name = match[1]
            parts[architecture, name] = ""
        elif name:
            parts[architecture, name] += line + "\n"
    return parts


def _wide_bytes(instruction: str, sass: str) -> int:
    return sum(int(bits) // 8 for bits in re.findall(rf"\b{instruction}\.\S*\b(128|256)\b", sass))


def _run(command: list[str | Path], **options: Any) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert process.returncode == 0, process.stderr
    return process.stdout


def find_waste(code: MachineCode) -> list[str]:
    """What no kernel of ours may have."""
    found = []
    if code.registers > MAX_REGISTERS:
        found.append(f"{code.registers} registers, more than {MAX_REGISTERS}")
    if code.stack or code.local:
        found.append(f"spills: {code.stack} bytes of stack, {code.local} of local memory")
    return found


@dataclass(frozen=True)
class Compilation:
    """A kernel with the types that a launch would give it.

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

    def bytes_per_thread(self, names: Iterable[str]) -> int:
        """How much of these arguments one thread of a whole block moves."""
        types = [kind for name in names for kind in _leaves(self.signature[name])]
        per_element = sum(BYTES[kind] for kind in types)
        threads = 32 * self.options.get("num_warps", 4)
        return self.constants.get("BLOCK", 0) * per_element // threads


def _leaves(kind: str | tuple[str, ...]) -> tuple[str, ...]:
    return (kind,) if isinstance(kind, str) else tuple(kind)


def find_problems(compilations: list[Compilation]) -> list[str]:
    """Compile for every architecture; one sentence per demand that is not met."""
    found = []
    reports = iter(_compile_in_another_process(compilations))
    for compilation in compilations:
        for _ in ARCHITECTURES:
            code = MachineCode(**next(reports))
            problems = find_waste(code) + _find_narrow_accesses(compilation, code)
            found += [f"{compilation} on {code.architecture}: {problem}" for problem in problems]
    return found


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


def _compile_in_another_process(compilations: list[Compilation]) -> list[dict[str, Any]]:
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    requests = json.dumps([asdict(compilation) for compilation in compilations])
    command = [sys.executable, "-m", "tests.kernels.inspect_triton"]
    return json.loads(_run(command, input=requests, cwd=ROOT, env=environment))


def _compile(compilation: Compilation, architecture: str) -> bytes:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"pyparallel.kernels.{compilation.module}")
    kernel = getattr(module, compilation.kernel)
    place = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    signature = {
        name: tuple(kind) if isinstance(kind, list) else kind
        for name, kind in compilation.signature.items()
    } | dict.fromkeys(compilation.constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: signature[name] for name in kernel.arg_names},
        constexprs={place[name]: value for name, value in compilation.constants.items()},
        attrs={key: [["tt.divisibility", 16]] for key in _aligned_places(compilation, place)},
    )
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options=compilation.options).asm["cubin"]


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


def _main() -> None:
    requests = [Compilation(**request) for request in json.load(sys.stdin)]
    jobs = [(request, architecture) for request in requests for architecture in ARCHITECTURES]
    cubins = [_compile(*job) for job in jobs]
    with ThreadPoolExecutor() as pool:  # the disassembler takes as long to start as Triton compiles
        codes = pool.map(_read_cubin, cubins, [architecture for _, architecture in jobs])
    print(json.dumps([asdict(code) for code in codes]))  # noqa: T201  the other process reads it


if __name__ == "__main__":
    _main()
