"""The memory of the tensors that autograd saves for the backward."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes(saved_tensors_hooks):
    """A context manager that tracks the tensors autograd saves in it, while they are alive.

    Counts dense tensors only, and nothing that a function saves by other means than autograd's.
    """

    def __init__(self) -> None:
        self._saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        super().__init__(self._pack, lambda saved: saved.tensor)

    def held(self) -> dict[int, int]:
        """Return the bytes of each storage still saved, by its address."""
        return storages(saved.tensor for saved in self._saved)

    def _pack(self, tensor: Tensor) -> "_SavedTensor":
        saved = _SavedTensor(tensor)
        self._saved.add(saved)
        return saved


class _SavedTensor:
    """What autograd saves instead of the tensor, freed together with the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # else an output and its graph would keep each other alive


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of these tensors, by its address."""
    dense = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return {storage.data_ptr(): storage.nbytes() for storage in dense}
