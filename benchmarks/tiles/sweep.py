"""Measure how the elements of a block are best divided among its threads, on one GPU.

``python -m benchmarks.tiles.sweep`` compiles ``sweep.cu`` by nvcc (about 20 seconds), runs it and
writes a CSV file: a row for each kernel, case, threads of a block, elements of a thread and length
of its runs of neighbors. All are timed in the same turns, in random order; ``of_copy`` is the rate
relative to a copy in the same turns. ``--compile-only sm_90`` needs no GPU.
"""

import argparse
import subprocess
from pathlib import Path

import torch

from benchmarks.harness.rows import RESULTS, commit

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
FIELDS = "op,case,threads,each,run,numel,median_ms,p20_ms,p80_ms,gb_per_s,of_copy"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, nargs="+", default=[2**27, 2**24])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the CSV file")
    parser.add_argument("--compile-only", metavar="ARCHITECTURE")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    program = options.out / "sweep"
    try:
        compile_sweep(program, options.compile_only or "native")
        if not options.compile_only:
            write_rows(program, options.numel, options.turns, options.out)
    finally:
        program.unlink(missing_ok=True)


def compile_sweep(program: Path, architecture: str) -> None:
    """Compile like the library: see CMakeLists.txt."""
    include = Path(torch.__file__).parent / "include"
    flags = ["-O3", "-std=c++17", "-fmad=false", f"-arch={architecture}", "-DUSE_CUDA"]
    torch_flags = ["-isystem", str(include), "-DTORCH_TARGET_VERSION=0x020B000000000000"]
    command = ["nvcc", *flags, *torch_flags, "-I", str(CSRC), str(HERE / "sweep.cu")]
    subprocess.run([*command, "-o", str(program)], check=True)


def write_rows(program: Path, sizes: list[int], turns: int, out: Path) -> None:
    """Write the rows of each size as they come, with the GPU's name in the file's."""
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    path = out / f"tiles-{name}.csv"
    with path.open("w") as file:
        file.write(f"{FIELDS},torch,commit\n")
        for numel in sizes:
            command = [program, str(numel), str(turns)]
            rows = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            for row in rows.splitlines():
                file.write(f"{row},{torch.__version__},{commit()}\n")
            file.flush()
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
