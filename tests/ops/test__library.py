"""Properties of every op that follow from how ops are defined."""

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import pyparallel
from pyparallel import ops
from pyparallel.ops import _library
from tests.gpu.catalog import CASES
from tests.ops import (
    test_adamw_step,
    test_mix,
    test_mix_quantized,
    test_pack_signs,
    test_quantize,
    test_random_k,
    test_sgd_step,
    test_top_k,
)


def numbers(count):
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


def double(*shape):
    return torch.ones(shape, dtype=torch.float64)


def steps():
    return {"lr": 0.1, "horizon": 1, "prediction": torch.empty(64)}


# By op and what else matters: each writes its first argument, a tensor of 64 numbers.
WRITERS = {
    "mix_": lambda z: ops.mix_(z, double(), [numbers(64)], double(1)),
    "mix_quantized_": lambda z: ops.mix_quantized_(
        z, double(), *([part] for part in ops.quantize(numbers(64), bits=8)), double(1), bits=8
    ),
    "mix_quantized_ with replicas": lambda replica: ops.mix_quantized_(
        torch.zeros(64), double(), *([part] for part in ops.quantize(numbers(64), bits=8)),
        double(1), bits=8, replicas=[replica],
    ),
    "quantize_difference_": lambda replica: ops.quantize_difference_(numbers(64), replica, 0.5),
    "scatter_add_": lambda dense: ops.scatter_add_(dense, numbers(2), torch.tensor([3, 9])),
    "sgd_step_": lambda param: ops.sgd_step_(param, numbers(64), torch.zeros(64), **steps()),
    "adamw_step_": lambda param: ops.adamw_step_(
        param, numbers(64), torch.zeros(64), torch.zeros(64), beta1=0.9, beta2=0.9, eps=1e-8,
        weight_decay=0.0, step=1, **steps(),
    ),
    "orthogonalize_": lambda matrix: ops.orthogonalize_([matrix.view(16, 4)]),
    "predict_sgd": lambda out: ops.predict_sgd(
        numbers(64), numbers(64), lr=0.1, horizon=1, out=out
    ),
    "quantize": lambda residual: ops.quantize(numbers(64), bits=8, residual=residual),
    "dequantize": lambda out: ops.dequantize(
        *ops.quantize(numbers(64), bits=8), bits=8, numel=64, out=out
    ),
    "pack_signs": lambda residual: ops.pack_signs(numbers(64), residual=residual),
    "unpack_signs": lambda out: ops.unpack_signs(*ops.pack_signs(numbers(64)), numel=64, out=out),
    "quantize_statistical": lambda residual: ops.quantize_statistical(
        numbers(64), residual=residual
    ),
    "dequantize_statistical": lambda out: ops.dequantize_statistical(
        *ops.quantize_statistical(numbers(64)), numel=64, out=out
    ),
    "top_k": lambda residual: ops.top_k(numbers(64), 5, residual=residual),
    "top_k_chunks": lambda residual: ops.top_k_chunks(numbers(64), 5, chunk=32, residual=residual),
    "scatter_chunks": lambda out: ops.scatter_chunks(
        *ops.top_k_chunks(numbers(64), 5), 5, numel=64, out=out
    ),
    "random_k": lambda residual: ops.random_k(numbers(64), 5, seed=1, residual=residual),
}  # fmt: skip


@pytest.mark.slow
def test_opcheck_finds_no_fault():
    for case in CASES:
        opcheck(case.op, case.sample(100))


def opcheck(op, arguments):
    torch.library.opcheck(getattr(torch.ops.pyparallel, op).default, tuple(arguments))


@pytest.mark.slow  # the same ops, without what may be left out, and with more of it
def test_opcheck_finds_no_fault_in_optional_arguments():
    nothing = {"num_messages": 0, "out_dtypes": (None, None)}
    spans = {"spans": [(0, 8), (50, 99)], "mix_after": True, "grad_scale": 4.0, "found_inf": 0.0}
    for around in (nothing, spans, {"out_dtypes": (None, torch.float32)}):
        opcheck("adamw_step_", test_adamw_step.sample(100, **around, counts=True).values())
        opcheck("sgd_step_", test_sgd_step.sample(100, **around).values())
        opcheck("sgd_step_", test_sgd_step.without_momentum(100, **around, counts=True).values())
    opcheck("mix_", test_mix.sample(100, 0))
    for num_messages, replicas in ((0, False), (3, True)):
        opcheck("mix_quantized_", test_mix_quantized.sample(100, num_messages, replicas=replicas))
    opcheck("top_k", test_top_k.sample(100, 7, kept=None))
    opcheck("random_k", test_random_k.sample(1000, 100, residual_dtype=None))
    opcheck("pack_signs", test_pack_signs.sample(3000, dtypes=(torch.float32, None)))
    x, _ = test_quantize.sample(100)
    opcheck("quantize", test_quantize.prepare(x, 4, "int", 32, None, None))


@pytest.mark.slow  # those of the steps are fast
@pytest.mark.parametrize("name", WRITERS)
def test_public_ops_compile_into_a_graph_without_breaks(name, monkeypatch):
    written, op = [torch.ones(64), torch.ones(64)], name.split()[0]
    expected = WRITERS[name](written[0])
    compiled = torch.compile(getattr(ops, op), fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(ops, op, compiled)
    found = WRITERS[name](written[1])
    for actual, wanted in zip(
        tree_leaves((written[1], found)), tree_leaves((written[0], expected)), strict=True
    ):
        assert actual is wanted is None or torch.equal(actual, wanted)


class MallInfo2(ctypes.Structure):
    """What glibc's mallinfo2() returns: counts of bytes, of which the eighth is in use."""

    _fields_ = tuple((f"field{index}", ctypes.c_size_t) for index in range(10))


def bytes_in_use():
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        pytest.skip("this libc has no mallinfo2()")
    count.restype = MallInfo2
    return count().field7


@pytest.mark.slow
def test_no_op_keeps_memory(subtests):
    for name, run in WRITERS.items():
        written = torch.ones(64)
        for _ in range(20):
            run(written)
        before = bytes_in_use()
        for _ in range(1500):
            run(written)
        with subtests.test(name):  # the smallest allocation has 32 bytes; others' may have 8 KiB
            assert bytes_in_use() - before < 1500 * 16


@pytest.mark.parametrize("name", WRITERS)
def test_what_torch_refuses_to_write_in_place_is_refused(name):
    with torch.inference_mode():
        inference = torch.ones(64)
        WRITERS[name](inference)
        inference.fill_(1)
    leaf = torch.ones(64, requires_grad=True)
    for tensor, text in ((leaf, "leaf Variable that requires grad"), (inference, "InferenceMode")):
        with pytest.raises(RuntimeError, match=text):
            WRITERS[name](tensor)
        assert (tensor == 1).all()
    with torch.no_grad():
        WRITERS[name](leaf)


def overlapping(arguments, i, j):
    """Arguments of which two tensors begin in one place: i and j are places of their leaves."""
    leaves, form = tree_flatten(arguments)
    length = max(leaves[i].nbytes, leaves[j].nbytes, 1)
    memory = torch.zeros(length, dtype=torch.uint8)
    for place in (i, j):
        shape, dtype = leaves[place].shape, leaves[place].dtype
        leaves[place] = memory[: leaves[place].nbytes].view(dtype).view(shape)
    return tree_unflatten(leaves, form), memory


def test_an_op_that_would_write_into_its_other_arguments_is_refused():
    """All pairs of tensors of all ops of which one is written, by the schemas."""
    problems, num_pairs = [], 0
    for case in CASES:
        op = getattr(torch.ops.pyparallel, case.op).default
        module = importlib.import_module(case.reference.__module__)
        check = getattr(module, f"_{case.op.strip('_')}_checked")
        takes_itself = case.op.startswith("predict")
        arguments = case.sample(64)
        writes = []
        for value, argument in zip(arguments, op._schema.arguments, strict=True):
            writes += [argument.is_write] * len(tree_leaves(value))
        leaves = tree_leaves(arguments)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for i, j in combinations(tensors, 2):
            if not (writes[i] or writes[j]) or not (leaves[i].nbytes and leaves[j].nbytes):
                continue
            if takes_itself and leaves[i].numel() == leaves[j].numel():
                continue
            num_pairs += 1
            own, memory = overlapping(arguments, i, j)
            try:
                check(*own)
                problems.append(f"{case.op}: {i}, {j} are taken")
            except ValueError as error:
                if "must not overlap" not in str(error) or memory.any():
                    problems.append(f"{case.op}: {i}, {j}: {error}")
    assert not problems, "\n".join(problems)
    assert num_pairs > 150


class Recorded(TorchDispatchMode):
    """Keeps the calls of this project's ops: overloads and arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pyparallel":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def versions(overload, values):
    arguments = zip(values, overload._schema.arguments, strict=True)
    written = tree_leaves([value for value, argument in arguments if argument.is_write])
    return torch.tensor([tensor._version for tensor in written if tensor is not None])


def test_public_functions_and_overloads_count_each_write_once():
    # The public function counts before its call, the overload in a kernel under ADInplaceOrView.
    for name, write in WRITERS.items():
        written = torch.ones(64)
        with Recorded() as recorded:
            write(written)
        overload, values = recorded.calls[-1]
        assert (overload.name(), written._version) == (f"pyparallel::{name.split()[0]}", 1)
        before = versions(overload, values)
        overload(*values)
        assert versions(overload, values).equal(before + 1), name


IMPORTS = [
    "import pyparallel",
    "from pyparallel import SGP",
    "from pyparallel import ops",
    "from pyparallel.ops import top_k",
    "import pyparallel.gossip",
    "from pyparallel.compression import TopK",
    "import importlib; importlib.import_module('pyparallel.subnets')",
]
SCRIPT = """import torch


def load():
    {}
    import pyparallel.pipeline


load()
import pyparallel.comm
"""


@pytest.fixture
def pure(tmp_path):
    """Return a folder with a copy of the package as a pure-Python install has it."""
    package = Path(pyparallel.__file__).parent
    shutil.copytree(
        package, tmp_path / "pyparallel", ignore=shutil.ignore_patterns("_native", "__pycache__")
    )
    return tmp_path


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-W", "always", *arguments],
        cwd=folder,
        # Accelerate has set the second one for this process, if a test has used it.
        env={**os.environ, "PYTHONPATH": str(folder), "PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def warnings_in(text):
    """Return the places of the warning about plain PyTorch."""
    lines = [line for line in text.splitlines() if "in plain PyTorch, which is slower" in line]
    return [line.partition(": RuntimeWarning: ")[0] for line in lines]


@pytest.mark.slow  # starts interpreters without the library
def test_a_pure_python_install_warns_once_at_the_users_import(pure):
    running = {}
    for index, statement in enumerate(IMPORTS):
        script = pure / f"user_{index}.py"
        script.write_text(SCRIPT.format(statement))
        running[script] = start(pure, str(script))
    doctor = start(pure, "-m", "pyparallel", "doctor")
    for script, process in running.items():
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert warnings_in(errors) == [f"{script}:5"], errors
        assert "; `python -m pyparallel doctor` prints what that costs and how to build" in errors
    printed, errors = doctor.communicate(timeout=120)
    assert doctor.returncode == 0, errors
    assert warnings_in(errors) == []  # it prints the same
    assert "compiled C++ [1]: CPU ops run in plain PyTorch and take, by the median, at" in printed


ON_AN_OLD_CARD = """import ctypes, types, torch

def answer(number, value):
    number._obj.value = value

driver = types.SimpleNamespace(
    cuInit=lambda flags: 0,
    cuDriverGetVersion=lambda number: answer(number, 13000),
    cuDeviceGetCount=lambda number: answer(number, 1),
    cuDeviceGetAttribute=lambda number, attribute, card: answer(number, {75: 7, 76: 5}[attribute]),
)
load, torch.version.cuda, torch.cuda.is_available = ctypes.CDLL, "13.0", lambda: True
ctypes.CDLL = lambda name, *more: driver if name == "libcuda.so.1" else load(name, *more)
from pyparallel import ops

for op in ops.names():
    print(op, ops.implementation(op, "cuda")[0])
"""


@pytest.mark.slow  # starts an interpreter
def test_where_the_cuda_library_does_not_run_triton_runs_every_op_it_has(pure):
    (pure / "pyparallel/_native").mkdir()
    (pure / "pyparallel/_native/libpyparallel_cuda.so").touch()
    (pure / "pyparallel/_native/build.json").write_text('{"cuda": "built with nvcc 13.0 for 90"}')
    (pure / "user.py").write_text(ON_AN_OLD_CARD)
    printed, errors = start(pure, "user.py").communicate(timeout=120)
    assert "runs its GPU ops in Triton and plain PyTorch, which is slower: the compiled " in errors
    assert (
        "built for 90 and not for cuda:0 of compute capability 7.5: build on this machine, "
        in errors
    )
    files = (Path(__file__).parents[2] / "kernels/triton").glob("*.py")
    kernels = "".join(file.read_text() for file in files)
    for op in ops.names():
        has_kernel = f"\ndef {op}(" in kernels
        runs_in = "Triton" if has_kernel else "plain PyTorch (the reference)"
        assert f"{op} {runs_in}\n" in printed, errors


def test_a_library_that_was_built_and_is_gone_is_said_to_be_missing(tmp_path, monkeypatch):
    (tmp_path / "build.json").write_text('{"cpu": "built with GNU 12.2.0", "cuda": "not built: x"}')
    monkeypatch.setattr(_library, "_NATIVE_FOLDER", tmp_path)
    reasons = [_library.load_native(device).unavailable_reason for device in ("cpu", "cuda")]
    assert reasons == [
        "missing, although it was built with GNU 12.2.0: install again",
        "not built: x",
    ]
