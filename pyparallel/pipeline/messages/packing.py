"""Payloads: the tensors of a value, one behind the other in memory."""

import ctypes

import torch
from torch import Tensor

from .format import HEADER_BYTES, Header, Value, aligned, tensors_of


def pack(value: Value) -> Tensor:
    """Return the payload of a value, uint8; a view if it is one contiguous tensor."""
    tensors = tensors_of(value)
    if not tensors:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    first = tensors[0].detach().resolve_conj().resolve_neg()
    length = sum(aligned(each.nbytes) for each in tensors)
    if len(tensors) == 1 and first.is_contiguous() and first.nbytes == length:
        return first.view(-1).view(torch.uint8)
    packed = torch.zeros(length, dtype=torch.uint8, device=first.device)
    begin = 0
    for tensor in tensors:
        part = packed[begin : begin + tensor.nbytes]
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        begin += aligned(tensor.nbytes)
    return packed


def pack_behind(header: Tensor, value: Value) -> None:
    """Write the payload of a value into the room behind a header."""
    begin, end = header.data_ptr() + HEADER_BYTES, header.data_ptr() + header.nbytes
    for each in tensors_of(value):
        plain = each.is_cpu and each.is_contiguous() and not (each.is_conj() or each.is_neg())
        tensor = each if plain else each.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if begin + tensor.nbytes > end:  # also without assertions: memory would be overwritten
            raise ValueError(
                f"a payload must fit behind its header, got {tensor.nbytes} bytes for room of "
                f"{end - begin}"
            )
        ctypes.memmove(begin, tensor.data_ptr(), tensor.nbytes)
        begin += aligned(tensor.nbytes)


def unpack(payload: Tensor, header: Header, begin: int = 0) -> Value:
    """Return the value from byte ``begin`` on as views, with the sender's ``requires_grad``."""
    tensors = []
    for meta in header.tensors:
        stride, strides = 1, [0] * len(meta.shape)
        for dim in reversed(range(len(meta.shape))):
            strides[dim] = stride
            stride *= meta.shape[dim]
        offset = begin // meta.dtype.itemsize
        tensor = payload.view(meta.dtype).as_strided(meta.shape, strides, offset)
        tensors.append(tensor.requires_grad_(meta.differentiable))
        begin += aligned(tensor.nbytes)
    return tensors[0] if header.single else tuple(tensors)
