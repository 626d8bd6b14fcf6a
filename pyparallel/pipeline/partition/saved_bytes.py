"""How much memory autograd keeps from a forward to its backward."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes(saved_tensors_hooks):
    """Notes what is saved while a forward runs; ``held`` tells what still is.

    Dense tensors only. What a function keeps in other ways than autograd's is not seen.
    """

    def __init__(self) -> None:
        self._saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        super().__init__(self._pack, lambda saved: saved.tensor)

    def held(self) -> dict[int, int]:
        """Bytes of each storage, by its address."""
        return storages(saved.tensor for saved in self._saved)

    def _pack(self, tensor: Tensor) -> "_SavedTensor":
        saved = _SavedTensor(tensor)
        self._saved.add(saved)
        return saved


class _SavedTensor:
    """What autograd holds instead of the tensor: gone when it lets go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # else an output would hold the graph that holds it


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage of these tensors, by its address."""
    dense = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return {storage.data_ptr(): storage.nbytes() for storage in dense}
