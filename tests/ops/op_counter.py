"""Counts of the ops that run, for tests of what a step consists of."""

from collections import Counter

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
