"""Kernel launches of each public op: for small tensors they cost more than the bytes do."""

import functools
import re
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pyparallel import ops
from pyparallel.ops import _corrupt
from tests.csrc.emulated import ROOT, count_bytes, count_launches, emulated
from tests.ops import test_top_k

if torch.cuda.is_available():
    pytest.skip("with a GPU its own library serves", allow_module_level=True)

NUMEL = 5000
LAUNCH_NOTHING = {"device", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty"}


class LaunchCounter(TorchDispatchMode):
    """Counts launches by ops on fake tensors: torch's one per op, this project's emulated."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        namespace, _, name = op._schema.name.partition("::")
        if namespace != "pyparallel":
            result = op(*args, **(kwargs or {}))
            on_gpu = any(each.device.type == "cuda" for each in _tensors((args, result)))
            if on_gpu and not op.is_view and name not in LAUNCH_NOTHING:
                self.counts["torch"] += 1
            return result
        with _disable_current_modes():
            before = count_launches()
            emulated(name)(*pytree.tree_map_only(torch.Tensor, _zeros_of, args))
            self.counts["own"] += count_launches() - before
        return None


def _tensors(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, FakeTensor)]


def _zeros_of(tensor):
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _calls(new):
    """Return calls of each public op; ``new`` makes a float32 tensor on the GPU."""
    x, y, z, number = new(NUMEL), new(NUMEL), new(NUMEL), new((), dtype=torch.float64)
    masses = new(1, dtype=torch.float64)
    half = new(NUMEL, dtype=torch.bfloat16)
    codes, scales = new(NUMEL, dtype=torch.int8), new(20)
    pairs, means = new(1250, dtype=torch.uint8), new(8)
    of_chunks = new(128), new(192, dtype=torch.uint8)
    several, factors = new((8, NUMEL), dtype=torch.int8), new((8, 20))
    words, mean = new(625, dtype=torch.uint8), new(5)
    places, few = new(50, dtype=torch.int32), new(50)
    hint, square, flag = new(()), new(NUMEL), new((), dtype=torch.bool)
    matrices, tall = [new(1250, 4), new(3, 100, 2)], new(6000, 4)
    headers, counted = new((4, 8), dtype=torch.float64), new((), dtype=torch.int64)
    expected = torch.zeros(4, 8, dtype=torch.float64, device="cpu")
    code = {"bits": 8, "format": "int"}
    sgd = {"lr": 0.1, "momentum": 0.9}
    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 3}
    decayed = {**adam, "weight_decay": 0.1}
    grads = {"grad": [new(5) for _ in range(1000)], "offsets": list(range(0, 5000, 5))}
    mixed = {"mass": number, "messages": [half], "masses": masses, "message": half}
    return {
        "mix_": lambda: ops.mix_(x, number, [y], masses),
        "mix_quantized_": lambda: ops.mix_quantized_(x, number, [codes], [scales], masses, **code),
        "sgd_step_": lambda: ops.sgd_step_(x, y, z, **sgd),
        "sgd_step_, message": lambda: ops.sgd_step_(x, y, z, **sgd, **mixed),
        "adamw_step_": lambda: ops.adamw_step_(x, y, z, square, **decayed),
        "adamw_step_, message": lambda: ops.adamw_step_(x, y, z, square, **decayed, **mixed),
        "adamw_step_, 1000 gradients": lambda: ops.adamw_step_(
            x, exp_avg=z, exp_avg_sq=square, **grads, **decayed
        ),
        "predict_sgd": lambda: ops.predict_sgd(x, y, lr=0.1, horizon=2),
        "predict_adam": lambda: ops.predict_adam(x, y, z, **adam, horizon=2),
        "quantize": lambda: ops.quantize(x, residual=y, seed=1),
        "dequantize": lambda: ops.dequantize(codes, scales, **code, numel=NUMEL),
        "dequantize_sum": lambda: ops.dequantize_sum(several, factors, **code, numel=NUMEL),
        "quantize_difference_": lambda: ops.quantize_difference_(x, y, 1.0),
        "pack_signs": lambda: ops.pack_signs(x, residual=y),
        "unpack_signs": lambda: ops.unpack_signs(words, mean, numel=NUMEL),
        "quantize_statistical": lambda: ops.quantize_statistical(x, residual=y),
        "dequantize_statistical": lambda: ops.dequantize_statistical(pairs, means, numel=NUMEL),
        "add_or_clear_": lambda: ops.add_or_clear_(x, y, clear=flag),
        "add_or_clear_, flag": lambda: ops.add_or_clear_(x, clear=flag),
        "screen_headers": lambda: ops.screen_headers(headers, expected, counter=counted),
        "top_k": lambda: ops.top_k(x, 50, threshold=hint),
        "top_k, residual": lambda: ops.top_k(x, 50, residual=y, threshold=hint),
        "top_k, 16-bit residual": lambda: ops.top_k(x, 50, residual=half, threshold=hint),
        "scatter_add_": lambda: ops.scatter_add_(x, few, places),
        "top_k_chunks": lambda: ops.top_k_chunks(x, residual=y),
        "scatter_chunks": lambda: ops.scatter_chunks(*of_chunks, numel=NUMEL),
        "random_k_indices": lambda: ops.random_k_indices(NUMEL, 50, seed=1, device="cuda"),
        "random_k": lambda: ops.random_k(x, 50, seed=1),
        "random_k, residual": lambda: ops.random_k(x, 50, seed=1, residual=y),
        "orthogonalize_": lambda: ops.orthogonalize_(matrices),
        "orthogonalize_, tall": lambda: ops.orthogonalize_([*matrices, tall]),
    }


# Launches of this project's kernels by an op that has more than one; there are none of torch's.
SEVERAL = {
    "sgd_step_, message": 2,
    "adamw_step_, message": 2,
    "top_k": 7,
    "top_k, residual": 7,
    "top_k, 16-bit residual": 8,
    "random_k_indices": 3,
    "random_k": 4,
    "random_k, residual": 5,
    "orthogonalize_, tall": 4,
}


class KnownCounter:
    """The counter of a GPU's corrupt entries after its first use."""

    def __init__(self):
        self.tensor = torch.zeros((), dtype=torch.int64, device="cuda")

    def num_unreported(self):
        return 0


def test_launches_per_call_are_few_and_those_of_the_documentation(monkeypatch):
    monkeypatch.setenv("EMULATED_SCALARS_ON_HOST", "1")  # numbers are arguments of kernels
    found = {}
    monkeypatch.setattr(_corrupt, "_is_counted", lambda like: True)
    with FakeTensorMode():
        monkeypatch.setattr(_corrupt, "_counters", {torch.device("cuda", 0): KnownCounter()})
        calls = _calls(functools.partial(torch.zeros, device="cuda"))
        for name, call in calls.items():
            with LaunchCounter() as counter:
                call()
            assert counter.counts["torch"] == 0, name
            found[name] = counter.counts["own"]
    assert found == dict.fromkeys(calls, 1) | SEVERAL
    page = (ROOT / "docs" / "results" / "ops.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| (\d+) \|$", page, re.MULTILINE)
    assert found == {name.replace("`", ""): int(launches) for name, launches in rows}


def test_a_wrong_threshold_costs_top_k_one_more_pass_over_what_it_compares():
    numel = 16 * 4096
    # A residual of 16 bits is read and written once more, when the winners are known.
    for kept, expected in {torch.float32: [12, 16], torch.bfloat16: [14, 20]}.items():
        found = []
        for threshold in (None, 1e30):
            arguments = test_top_k.sample(numel, 600, kept=kept, threshold=threshold)
            before = count_bytes()
            emulated("top_k")(*arguments)
            found.append((count_bytes() - before) / numel)
        assert found == expected, f"{kept}"


def test_torchs_ops_which_serve_without_nvcc_do_not_stop_the_host():
    # Triton has kernels for element-wise ops alone. A tensor on "meta" has no values to read.
    for name, call in _calls(functools.partial(torch.zeros, device="meta")).items():
        if not name.startswith("random_k"):  # walks on while a number is outside
            call()
