"""Bytes in flight on a multiprocessor, from the machine code of the kernels; nothing is measured.

``python -m benchmarks.tiles.in_flight LIBRARY`` writes ``benchmarks/results/in-flight-sm_90.csv``
from ``libpyparallel_cuda.so``. Memory that moves B bytes/s after a latency of T seconds is busy
only while about B * T bytes are in flight: at 4.3 TB/s and 0.8 us, 26 KB for each of an H200's 132
multiprocessors. No thread waits for what it writes, so a kernel needs the loads' part of that.
"""

import argparse
import csv
import re
import subprocess
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from benchmarks.harness.rows import RESULTS
from benchmarks.tiles.loads import disassemble, find_loads, read_listing

ARCHITECTURE = "sm_90"
REGISTERS, THREADS, SHARED = 65536, 2048, 228 * 1024  # of a multiprocessor of sm_90
RESERVED = 1024  # bytes of shared memory, of every block
DEFAULT_THREADS = 512
OTHER_THREADS = dict.fromkeys(("apply_kernel", "gram_kernel", "orthogonalize_kernel"), 256)
KIB_WANTED = 32


@dataclass(frozen=True)
class Row:
    """A kernel, ``blocks`` of which fit on a multiprocessor.

    Args:
        bytes_loaded, bytes_stored: of a thread, before it uses what it loads and in all; of dtypes
            that are known at run time only, loads are those of float32, and stores those of every
            dtype together.
        kib_in_flight: of all threads of the multiprocessor, before they use what they load.
    """

    kernel: str
    types: str
    threads: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    blocks: int
    bytes_loaded: int
    bytes_stored: int
    kib_in_flight: float

    @property
    def kib_wanted(self) -> float:
        """Return the loads' part of KIB_WANTED."""
        return KIB_WANTED * self.bytes_loaded / (self.bytes_loaded + self.bytes_stored)


def find_rows(library: Path) -> list[Row]:
    """Return a row for each kernel of a library, or a cubin, that loads its buffers evict-first."""
    architecture = None if library.suffix == ".cubin" else ARCHITECTURE
    usage = read_usage(library, architecture)
    rows = []
    for mangled, instructions in disassemble(library, architecture).items():
        loads = find_loads(instructions)
        if loads.bytes_in_flight == 0:
            continue
        registers, spilled, shared = usage[mangled]
        kernel, types = readable_name(mangled)
        tile = re.match(r"Tile<(\d+),", types)
        threads = int(tile[1]) if tile else OTHER_THREADS.get(kernel, DEFAULT_THREADS)
        blocks = count_blocks(threads, registers, shared)
        stored = sum(each.num_bytes for each in instructions if each.is_streaming_store)
        usages = (threads, registers, spilled, shared, blocks)
        moved = (loads.bytes_in_flight, stored, blocks * threads * loads.bytes_in_flight / 1024)
        rows.append(Row(kernel, re.sub(r"^Tile<\d+, 8, 8>, ", "", types), *usages, *moved))
    return sorted(rows, key=lambda row: (row.kernel, row.types))


def count_blocks(threads: int, registers: int, shared: int) -> int:
    """Return the blocks that fit on a multiprocessor: registers are given out by eights."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(by_registers, THREADS // threads, SHARED // (shared + RESERVED), 32)


def read_usage(library: Path, architecture: str | None) -> dict[str, tuple[int, int, int]]:
    """Return the registers, the bytes of spills and those of shared memory of each kernel."""
    listing = read_listing(library, architecture, "-res-usage")
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", listing)
    return {
        name: (int(registers), int(stack) + int(local), int(shared))
        for name, registers, stack, shared, local in found
    }


def readable_name(mangled: str) -> tuple[str, str]:
    """Return a kernel's name and its template arguments, without namespaces."""
    run = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True)
    name = re.sub(r"(pyparallel|cuda|c10|\(anonymous namespace\))::", "", run.stdout)
    for long, short in FORMATS.items():
        name = name.replace(long, short)
    match = re.match(r"(?:void )?(\w+)(?:<(.*)>)?\(", name)
    if match is None:
        raise ValueError(f"mangled must be the name of a kernel, got {mangled}")
    # The function of an element comes last, without the type of its scalars.
    return match[1], re.sub(r"(\w+)Element, \w+, (.*)", r"\2, \1", match[2] or "")


# The aliases of csrc/quantize.h.
FORMATS = {
    "Integers<8>": "Int8",
    "Integers<4>": "Int4",
    "Floats<3, 7, 126>": "E4M3",
    "Floats<2, 15, 123>": "E5M2",
    "PowersOfTwo<false>": "Natural",
    "BFloat16": "bfloat16",
    "Half": "float16",
    "float,": "float32,",
    "float>": "float32>",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path, nargs="+", help="or cubins, by nvcc -cubin")
    parser.add_argument("--out", type=Path, default=RESULTS / f"in-flight-{ARCHITECTURE}.csv")
    options = parser.parse_args()
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Row)])
        for library in options.library:
            writer.writerows(astuple(row) for row in find_rows(library))


if __name__ == "__main__":
    main()
