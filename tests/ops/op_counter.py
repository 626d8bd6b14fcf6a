"""Counts of the ops that run, and of their bytes, for tests of what a step consists of."""

from collections import Counter

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class OpCounter(TorchDispatchMode):
    """Counts the calls of this project's ops, and of some of torch's, by name.

    Args:
        also: names of ATen ops, such as "mul_".
    """

    def __init__(self, *also):
        super().__init__()
        self.calls = Counter()
        self._also = also

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        namespace, _, name = op._schema.name.partition("::")
        if namespace == "pyparallel" or name in self._also:
            self.calls[name] += 1
        return op(*args, **(kwargs or {}))


ALLOCATIONS = {"lift_fresh", "empty", "empty_like", "empty_strided", "new_empty"}
# Which arguments an op writes without reading them, and which it reads and writes in few places.
WRITTEN = {
    "zero_": ["self"],
    "copy_": ["self"],
    "fill_": ["self"],
    "quantize": ["codes", "scales"],
    "dequantize": ["out"],  # unless it accumulates
    "dequantize_sum": ["out"],
    "pack_signs": ["words", "scales"],
    "unpack_signs": ["out"],
    "top_k": ["values", "indices"],
}


class ByteCounter(TorchDispatchMode):
    """Counts the ops that launch something, and the bytes that they read and write.

    Views and allocations do neither. ``add_or_clear_`` with a flag alone reads the flag: it is not
    set. ``scatter_add_`` reads and writes the entries that it adds to.
    """

    def __init__(self):
        super().__init__()
        self.num_ops = self.num_bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name = op._schema.name.partition("::")[2]
        if op.is_view or name in ALLOCATIONS:
            return result
        given = dict(zip([each.name for each in op._schema.arguments], args, strict=False))
        given |= kwargs or {}
        self.num_ops += 1
        if name == "add_or_clear_" and given["y"] is None:
            self.num_bytes += given["clear"].nbytes
            return result
        accumulates = given.get("accumulate", False)
        for argument in op._schema.arguments:
            value = given.get(argument.name)
            is_read = argument.name not in WRITTEN.get(name, []) or accumulates
            is_read = is_read and not argument.is_out and not name.startswith("new_")
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    numel = tensor.numel()
                    if name == "scatter_add_" and argument.name == "dense":
                        numel = given["values"].numel()
                    self.num_bytes += numel * tensor.element_size() * (is_read + is_written)
        arguments = pytree.tree_leaves((args, kwargs))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not any(tensor is each for each in arguments):
                self.num_bytes += tensor.nbytes
        return result
