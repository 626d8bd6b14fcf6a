"""Kernel launches of each public op: at 2**20 elements they cost more than the bytes do."""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pyparallel import ops
from tests.csrc.emulated import count_launches, emulated

if torch.cuda.is_available():
    pytest.skip("with a GPU its own library serves", allow_module_level=True)

NUMEL = 5000
LAUNCH_NOTHING = {"device", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty"}


class LaunchCounter(TorchDispatchMode):
    """Counts kernels of this project, by emulating its ops, and those of torch by their ops.

    Args:
        fake: the mode whose tensors on the device "cuda" stand in for those of a GPU.
    """

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self.counts = Counter()
        self._fake = fake

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
    mass = torch.ones((), dtype=torch.float64)
    masses = new(1, dtype=torch.float64)
    half = new(NUMEL, dtype=torch.bfloat16)
    codes, scales = new(NUMEL, dtype=torch.int8), new(20)
    words, mean = new(625, dtype=torch.uint8), new(5)
    places, few = new(50, dtype=torch.int32), new(50)
    count, hint, square = new((), dtype=torch.int64), new(()), new(NUMEL)
    matrices = [new(1250, 4), new(3, 100, 2)]
    code = {"bits": 8, "format": "int"}
    sgd = {"lr": 0.1, "momentum": 0.9}
    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 3}
    decayed = {**adam, "weight_decay": 0.1}
    mixed = {"mass": number, "messages": [half], "masses": masses, "message": half}
    return {
        "mix_": lambda: ops.mix_(x, number, [y], masses),
        "mix_quantized_": lambda: ops.mix_quantized_(
            x, number, [codes], [scales], masses, **code, corrupt=count
        ),
        "sgd_step_": lambda: ops.sgd_step_(x, y, z, **sgd),
        "sgd_step_, message": lambda: ops.sgd_step_(x, y, z, **sgd, **mixed),
        "adamw_step_": lambda: ops.adamw_step_(x, y, z, square, **decayed),
        "adamw_step_, message": lambda: ops.adamw_step_(x, y, z, square, **decayed, **mixed),
        "predict_sgd": lambda: ops.predict_sgd(x, y, lr=0.1, horizon=2),
        "predict_adam": lambda: ops.predict_adam(x, y, z, **adam, horizon=2),
        "quantize": lambda: ops.quantize(x, residual=y, seed=1),
        "dequantize": lambda: ops.dequantize(codes, scales, **code, numel=NUMEL),
        "dequantize, counter": lambda: ops.dequantize(
            codes, scales, **code, numel=NUMEL, corrupt=count
        ),
        "quantize_difference_": lambda: ops.quantize_difference_(x, y, 1.0),
        "pack_signs": lambda: ops.pack_signs(x, residual=y),
        "unpack_signs": lambda: ops.unpack_signs(words, mean, numel=NUMEL),
        "unpack_signs, counter": lambda: ops.unpack_signs(words, mean, numel=NUMEL, corrupt=count),
        "top_k": lambda: ops.top_k(x, 50, threshold=hint),
        "top_k, residual": lambda: ops.top_k(x, 50, residual=y, threshold=hint),
        "top_k, 16-bit residual": lambda: ops.top_k(x, 50, residual=half, threshold=hint),
        "scatter_add_": lambda: ops.scatter_add_(x, few, places),
        "scatter_add_, counter": lambda: ops.scatter_add_(x, few, places, corrupt=count),
        "random_k_indices": lambda: ops.random_k_indices(NUMEL, 50, seed=1, device="cuda"),
        "random_k": lambda: ops.random_k(x, 50, seed=1),
        "random_k, residual": lambda: ops.random_k(x, 50, seed=1, residual=y),
        "orthogonalize_": lambda: ops.orthogonalize_(matrices),
    }


EXPECTED = {}


def test_launches_per_call(monkeypatch):
    monkeypatch.setenv("EMULATED_SCALARS_ON_HOST", "1")
    found = {}
    with FakeTensorMode() as fake:
        for name, call in _calls(lambda *shape, **kw: torch.zeros(*shape, device="cuda", **kw)).items():
            with LaunchCounter(fake) as counter:
                call()
            found[name] = (counter.counts["own"], counter.counts["torch"])
    for k, v in found.items(): print(k, *v, sep=";")
    assert found == EXPECTED
