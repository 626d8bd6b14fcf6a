"""The compiled libraries without a GPU: the CUDA kernels' machine code, and their linkage."""

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import pyparallel
from benchmarks.tiles.in_flight import find_rows, readable_name
from benchmarks.tiles.loads import disassemble, find_loads
from tests.cases import nightly
from tests.kernels.inspect_triton import ARCHITECTURES, MachineCode, find_waste, read_machine_code

NATIVE = Path(pyparallel.__file__).parent / "_native"
LIBRARIES = ["cpu", pytest.param("cuda", marks=pytest.mark.slow)]
# They process no buffer, so 16-byte accesses are not required.
ONE_WARP = {"add_masses_kernel", "scalars_kernel", "screen_headers_kernel", "step_numbers_kernel"}
# Besides floats they access codes, eight or four bytes per thread.
ONE_WAY = {
    "quantize_kernel",
    "dequantize_kernel",
    "dequantize_statistical_kernel",
    "dequantize_sum_kernel",
}
# They access scattered entries, or the few numbers of each block.
NARROW = {
    "begin_kernel",
    "draw_runs_kernel",
    "expand_bitmap_kernel",
    "expand_runs_kernel",
    "find_entries_kernel",
    "gather_kernel",
    "mark_runs_kernel",
    "scatter_add_kernel",
    "scatter_chunks_kernel",
    "write_kernel",
}
# They read all of a buffer, and write a few numbers or the entries found.
READERS = {"collect_kernel", "gram_kernel", "histogram_kernel", "retry_kernel"}
# They read a flag alone.
WRITERS = {"clear_kernel"}
# Kernels that load buffers in several batches, each before its first use, and why.
IN_BATCHES = {
    r"mix_kernel<.*, 0>": "more than two messages do not fit in the registers: two at a time",
    r"mix_quantized_kernel<.*, 0>": "the same",
    r"dequantize_sum_kernel<.*>": "four messages at a time",
    r"pack_signs_kernel<.*, 0>": "the chunks of a long block do not fit, and are read twice",
    r"pack_signs_kernel<.*, 4>": "nor does the residual of four chunks beside them",
    r"step_kernel<.*, true>": "messages are mixed in before the rest is loaded, or after",
    r"(orthogonalize|gram|apply)_kernel<.*>": "a block goes through its rows in tiles",
    r"(histogram|retry)_kernel<.*>": "a block goes through several parts, where a guess has failed",
}
NEWEST_GLIBC = (2, 34)


def find_library(name: str) -> Path:
    if name == "cuda" and shutil.which("nvcc") is None:
        pytest.skip("nvcc is not found: there is no CUDA library to inspect")
    path = NATIVE / f"libpyparallel_{name}.so"
    assert path.exists(), f"{path.name} is missing: `make test-slow` builds it"
    return path


@pytest.fixture(scope="module")
def kernels() -> list[MachineCode]:
    return read_machine_code(find_library("cuda"))


@functools.cache
def short_name(mangled: str) -> str:
    """Return, for example, mix_kernel from the mangled name of a template instance."""
    demangled = run("c++filt", mangled)
    match = re.search(r"(\w+_kernel)\b", demangled)
    assert match, f"a kernel is named <op>_kernel, got {demangled}"
    return match[1]


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.nightly  # the slow tests build for one
def test_every_architecture_has_every_kernel(kernels):
    names = {name: [] for name in ARCHITECTURES}
    for code in kernels:
        names[code.architecture].append(code.name)
    assert all(sorted(found) == sorted(names["sm_80"]) for found in names.values())


@pytest.mark.slow
def test_the_record_of_the_build_names_the_architectures_that_the_library_has(kernels):
    # By this record a library is loaded or not: to ask a kernel would allocate memory on each card.
    outcome = json.loads((NATIVE / "build.json").read_text())["cuda"]
    recorded = re.findall(r"\d+", outcome.partition(" for ")[2])
    assert {f"sm_{number}" for number in recorded} == {code.architecture for code in kernels}


@pytest.mark.slow
def test_there_are_few_kernels(kernels):
    # A dtype that costs the main path little is an argument of the kernel, not of the template.
    assert len({code.name for code in kernels}) <= 275


@pytest.mark.slow
def test_no_kernel_wastes_registers_or_spills(kernels):
    problems = [(code.architecture, code.name, find_waste(code)) for code in kernels]
    assert [problem for problem in problems if problem[2]] == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90", nightly("sm_100")])
def test_no_kernel_uses_the_predicate_of_a_minimum(architecture):
    # That of VIMNMX.RELU, as ptxas 13.0 used it, was wrong on an H200.
    found = [
        f"{short_name(name)}: {each.opcode} {each.operands}"
        for name, code in disassemble(find_library("cuda"), architecture).items()
        for each in code
        if each.opcode.startswith("VIMNMX")
        and re.match(r"R\w+, (U?P[0-6]|P?T, U?P[0-6])", each.operands)
    ]
    assert found == []


@pytest.mark.slow
def test_every_element_kernel_moves_16_bytes_at_a_time(kernels):
    streaming = [code for code in kernels if short_name(code.name) not in ONE_WARP | NARROW]
    assert {short_name(code.name) for code in streaming} >= {"mix_kernel"}
    ways = [(short_name(c.name), [c.wide_load_bytes, c.wide_store_bytes]) for c in streaming]
    assert [way for way in ways if sum(way[1]) == 0] == []
    assert [way for way in ways if 0 in way[1] and way[0] not in ONE_WAY | READERS | WRITERS] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [each if each == "sm_90" else nightly(each) for each in ARCHITECTURES]
)
def test_every_load_of_a_buffer_precedes_the_first_use(architecture):
    rows, seen = [], set()
    for name, code in disassemble(find_library("cuda"), architecture).items():
        loads = find_loads(code)
        if loads.bytes_in_flight:
            kernel = "{}<{}>".format(*readable_name(name))
            allowed = [pattern for pattern in IN_BATCHES if re.fullmatch(pattern, kernel)]
            seen.update(allowed)
            late = loads.late_in_branch if allowed else loads.late
            rows.append((kernel, bool(allowed), [each.address for each in late]))
    assert len(rows) > 100
    assert [row for row in rows if row[2]] == []
    assert seen == IN_BATCHES.keys()


@pytest.mark.slow
def test_enough_loads_are_in_flight_to_keep_the_memory_busy():
    rows = find_rows(find_library("cuda"))
    assert {"map_kernel", "mix_kernel", "quantize_kernel"} <= {row.kernel for row in rows}
    in_tiles = {"orthogonalize_kernel", "gram_kernel", "apply_kernel", "histogram_kernel"}
    in_tiles |= {"retry_kernel"}
    streaming = [row for row in rows if row.kernel not in in_tiles]
    assert [row for row in streaming if row.kib_in_flight < row.kib_wanted] == []


@pytest.mark.slow
def test_the_pass_that_stores_acc_in_the_residual_writes_16_bytes_at_a_time(kernels):
    passes = [
        c for c in kernels if short_name(c.name) == "collect_kernel" and "Accumulate" in c.name
    ]
    architectures = {code.architecture for code in kernels}
    assert len(passes) == 3 * len(architectures)  # a kernel for each dtype of x
    assert [code for code in passes if code.wide_store_bytes == 0] == []


@pytest.mark.slow
def test_a_few_operations_on_doubles_make_the_numbers_of_a_step():
    # The whole pass waits for them. Powers are the host's, unless the step itself is on the device.
    counts = {}
    for name, code in disassemble(find_library("cuda"), "sm_90").items():
        if short_name(name) == "step_numbers_kernel":
            doubles = [each for each in code if re.match("D(ADD|MUL|FMA|SETP)|.*64H", each.opcode)]
            counts[readable_name(name)[1]] = len(doubles)
    limits = {"MakeSgdStep, SgdStep": 60, "MakeAdamwStep, AdamwStep": 60}
    limits["MakeAdamwStepOnDevice, AdamwStep"] = 200
    assert counts.keys() == limits.keys()
    assert {name: count for name, count in counts.items() if count > limits[name]} == {}


@pytest.mark.slow
def test_the_exceptions_exist(kernels):
    exceptions = ONE_WARP | ONE_WAY | NARROW | READERS | WRITERS
    assert {short_name(code.name) for code in kernels} >= exceptions


@pytest.mark.parametrize("name", LIBRARIES)
def test_errors_contain_no_path_of_the_build_machine(name):
    # Check macros contain their file name.
    content = find_library(name).read_bytes()
    folders = (Path(__file__).resolve().parents[2], Path(torch.__file__).parent)
    assert b"csrc/tensor_checks.h" in content
    assert [folder for folder in folders if str(folder).encode() in content] == []


@pytest.mark.parametrize("name", LIBRARIES)
def test_no_symbol_of_python_is_needed(name):
    undefined = run("nm", "--dynamic", "--undefined-only", find_library(name)).split()
    assert any(symbol.startswith("aoti_torch_") for symbol in undefined)
    assert [symbol for symbol in undefined if re.match(r"_?Py", symbol)] == []


@pytest.mark.parametrize("name", LIBRARIES)
def test_old_c_libraries_are_supported(name):
    needed = re.findall(r"@GLIBC_([\d.]+)", run("nm", "--dynamic", find_library(name)))
    versions = {tuple(map(int, version.split("."))) for version in needed}
    assert versions
    assert max(versions) <= NEWEST_GLIBC


@pytest.mark.parametrize("name", LIBRARIES)
def test_it_needs_torch_by_name_and_no_cuda_runtime(name):
    dynamic = run("readelf", "--dynamic", find_library(name))
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    torch = {"libtorch_cpu.so", "libc10.so"} | ({"libtorch_cuda.so"} if name == "cuda" else set())
    assert torch <= set(needed)
    assert [library for library in needed if library.startswith("libcudart")] == []
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
