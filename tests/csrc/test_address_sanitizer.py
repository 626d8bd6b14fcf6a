"""The compiled CPU ops under AddressSanitizer: no argument makes them leave a buffer."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent
FLAGS = [
    *("-std=c++17", "-O1", "-g", "-fPIC", "-ffp-contract=off", "-fsanitize=address"),
    "-DTORCH_TARGET_VERSION=0x020B000000000000",
]


def preloaded() -> str:
    """What a process that was not built for the sanitizer must load before all else.

    The sanitizer looks for C++'s way to throw when it is loaded: hence the standard library too.
    """
    names = ["libasan.so", "libstdc++.so"]
    commands = [["c++", f"-print-file-name={name}"] for name in names]
    paths = [subprocess.check_output(command, text=True).strip() for command in commands]
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip("the C++ compiler has no AddressSanitizer that a process can load first")
    return " ".join(paths)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of csrc/cpu, compiled by the sanitizer."""
    folder = tmp_path_factory.mktemp("address_sanitizer")
    machine = ["-mavx2", "-mfma", "-mf16c"] if os.uname().machine == "x86_64" else []
    includes = ["-I", ROOT / "csrc", "-isystem", TORCH / "include"]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        command = ["c++", *FLAGS, *machine, *includes, "-c", source, "-o", target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))))
    path = folder / "libpyparallel_cpu.so"
    torch_libraries = [TORCH / "lib" / "libtorch_cpu.so", TORCH / "lib" / "libc10.so"]
    link = ["c++", "-shared", "-fsanitize=address", *objects, *torch_libraries, "-o", path]
    subprocess.run(link, check=True, capture_output=True)
    return path


def run(library: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in which the ops are those of the library, on buffers the sanitizer guards."""
    prelude = f"""
        import torch
        load, loaded = torch.ops.load_library, []
        torch.ops.load_library = lambda path: (load({str(library)!r}), loaded.append(path))
        from pyparallel import ops
        assert [path.name for path in loaded] == ["libpyparallel_cpu.so"], loaded
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded(),
        # Python leaks by design; torch's threads are not waited for.
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
    }
    environment.pop("TRITON_INTERPRET", None)
    source = textwrap.dedent(prelude) + textwrap.dedent(script)
    command = [sys.executable, "-c", source]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_an_access_outside_a_buffer_is_seen(library):
    # The sanitizer guards torch's memory too: a view that claims more than there is gives it away.
    done = run(
        library,
        """
        import ctypes
        short = torch.zeros(1000)
        claim = (ctypes.c_float * 2000).from_address(short.data_ptr())
        long = torch.frombuffer(claim, dtype=torch.float32)
        ops.predict_sgd(long, torch.zeros(2000), lr=0.1, horizon=1)
        """,
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


def test_quantized_messages_of_every_length_and_corruption(library):
    done = run(
        library,
        """
        generator = torch.Generator().manual_seed(0)
        forms = [(8, "int"), (4, "int"), (8, "e4m3"), (8, "e5m2")]
        refused = accepted = 0
        for numel in (0, 1, 2, 7, 31, 33, 63, 65, 100, 255, 257, 1025, 4097, 9001):
            for bits, format in forms:
                for block_size in (32, 256, 4096):
                    kind = {"bits": bits, "format": format, "block_size": block_size}
                    x = torch.randn(numel, generator=generator).to(
                        [torch.float32, torch.bfloat16, torch.float16][numel % 3])
                    residual = torch.zeros(numel).to([torch.bfloat16, torch.float32][numel % 2])
                    for seed in (None, 1):
                        codes, scales = ops.quantize(x, **kind, residual=residual, seed=seed)
                        ops.quantize(x, **kind, seed=seed)
                    masses = torch.ones(1).double()
                    for bad_codes in (False, True):
                        for bad_scales in (False, True):
                            c = torch.randint(-128, 128, codes.shape, generator=generator)
                            c = c.to(torch.int8).view(codes.dtype) if bad_codes else codes
                            s = scales.clone()
                            if bad_scales and s.numel():
                                s[-1] = float("inf")
                            weight, z = torch.tensor(1.0).double(), torch.zeros(numel)
                            for call in (
                                lambda: ops.dequantize(c, s, **kind, numel=numel),
                                lambda: ops.dequantize(
                                    c, s, **kind, numel=numel, out=z, accumulate=True),
                                lambda: ops.mix_quantized_(z, weight, [c], [s], masses, **kind),
                            ):
                                try:
                                    call()
                                    accepted += 1
                                except RuntimeError:
                                    refused += 1
                    # Wrong lengths, told to the op itself.
                    op, counter = torch.ops.pyparallel.dequantize, torch.tensor(0)
                    for c, s, out in (
                        (codes[1:], scales, z), (codes, scales[1:], z),
                        (codes, scales, torch.zeros(numel + block_size + 1)),
                    ):
                        try:
                            op(c, s, bits, format, block_size, False, out, counter)
                            assert c.numel() == codes.numel() and s.numel() == scales.numel()
                        except RuntimeError:
                            refused += 1
        assert refused > 500 and accepted > 500, (refused, accepted)
        print("clean")
        """,
    )
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-3000:]
