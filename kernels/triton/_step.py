"""Shared parts of the optimizer steps: where gradients lie, mixing, and what is stored after."""

import functools

import torch
from torch import Tensor

import triton
import triton.language as tl

from . import mix
from ._floats import round_to, to_fp32
from ._scalars import argument

BLOCK = 2048  # four elements per thread: eight, as elsewhere, would take too many registers
PART = 512  # one per thread, where each has a mask and the address of its gradient
OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}
if torch.version.hip is None:  # the compiler for AMD's cards knows no such option
    OPTIONS["maxnreg"] = 64


@triton.jit
def load(source, offsets, mask):
    """Load a buffer's entries in fp32."""
    return to_fp32(tl.load(source + offsets, mask=mask))


@triton.jit
def find_rows(table, num_rows, places):
    """Return pointers to the rows of ``grad_table`` with places of the buffer: a binary search."""
    row, half = (places * 0).to(tl.int32), num_rows // 2
    while half > 0:
        begin = tl.load(table + 2 * (row + half))
        row = tl.where(begin <= places, row + half, row)
        half = half // 2
    return table + 2 * row


@triton.jit
def find_grads(rows, grad, places):
    """Return the addresses of the gradients of places in these rows, 0 where there is none."""
    SIZE: tl.constexpr = grad.dtype.element_ty.primitive_bitwidth // 8
    address = tl.load(rows + 1)
    return tl.where(address != 0, address + (places - tl.load(rows)) * SIZE, 0)


@triton.jit
def load_grads(addresses, grad):
    """Load the gradients of entries, in fp32; 0 where there is none."""
    return to_fp32(tl.load(addresses.to(grad.dtype), mask=addresses != 0, other=0.0))


@triton.jit
def load_grad(address, grad, BLOCK: tl.constexpr):
    """Load the gradient of a block from its address, in fp32; 0 if there is none."""
    places = tl.arange(0, BLOCK)
    gradient = tl.zeros([BLOCK], tl.float32)
    if address % 16 != 0:
        gradient = load(address.to(grad.dtype), places, None)
    elif address != 0:  # only aligned accesses become 16 bytes wide
        gradient = load(tl.multiple_of(address.to(grad.dtype), 16), places, None)
    return gradient


@triton.jit
def mix_messages(own, mixing, offsets, mask, NUM_MESSAGES: tl.constexpr):
    """Return parameters mixed with messages and their coefficients as in ``mix_``."""
    if NUM_MESSAGES > 0:
        messages, coefficients = mixing
        delta = mix.nothing(own)
        for j in tl.static_range(NUM_MESSAGES):
            message = load(messages[j], offsets, mask)
            delta = mix.add_message(delta, own, message, tl.load(coefficients + j))
        own += delta
    return own


@triton.jit
def store_rounded(values, target, offsets, mask):
    """Store fp32 values; return them as rounded by the buffer's dtype, in fp32."""
    rounded = round_to(values, target.dtype.element_ty)
    tl.store(target + offsets, rounded, mask=mask)
    return to_fp32(rounded)


@triton.jit
def settle(
    own, param, mixing, message, offsets, mask,
    NUM_MESSAGES: tl.constexpr, MIX_AFTER: tl.constexpr,
):  # fmt: skip
    """Store the stepped values and the next message; return the parameters as rounded."""
    if MIX_AFTER:
        if message is not None:
            store_rounded(own, message, offsets, mask)
        own = mix_messages(own, mixing, offsets, mask, NUM_MESSAGES)
    own = store_rounded(own, param, offsets, mask)
    if message is not None and not MIX_AFTER:
        store_rounded(own, message, offsets, mask)
    return own


@triton.jit
def count_nonfinite(gradient, nonfinite, mask):
    """Return which gradients are finite, and add the number of the others to a counter."""
    is_finite = tl.abs(gradient) < float("inf")  # not of NaN
    found = is_finite == 0
    if mask is not None:
        found = found & mask
        is_finite = is_finite & mask
    # One by one, and rarely: a sum over the block would take too many registers.
    tl.atomic_add(nonfinite + tl.zeros_like(gradient).to(tl.int32), 1.0, mask=found)
    return is_finite


def take_messages(
    param: Tensor, mass: Tensor, messages: list[Tensor], masses: Tensor, mix_after: bool
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor]:
    """Add the messages' masses to the rank's own.

    PushSum is associative: messages beyond those of one launch are mixed in here, unless the step
    comes first.

    Returns:
        The launches' messages, their coefficients, and the mass with which the rank steps.
    """
    before = mass.clone() if mix_after else mass
    if not messages:
        return (), None, before
    first = 0 if mix_after else max(0, len(messages) - mix.MAX_MESSAGES)
    mix.mix_(param, mass, messages[:first], masses[:first])
    rest = masses[first:]
    mass.copy_(sum(rest.unbind(), start=mass))
    return tuple(messages[first:]), (rest / mass).float(), before


def grad_table(
    param: Tensor, grads: list[Tensor], offsets: list[int]
) -> tuple[Tensor, Tensor, int]:
    """Return a tensor of the gradients' dtype, the table of where they lie, and its rows."""
    return grads[0] if grads else param, *new_table(param.numel(), param.device, grads, offsets)


def new_table(
    numel: int, device: torch.device, grads: list[Tensor], offsets: list[int]
) -> tuple[Tensor, int]:
    """Return the table of where gradients lie that cover parts of ``numel`` elements, and its rows.

    A row has the first element of a range with one gradient or none, and the gradient's address or
    0; rows behind the last range have the number of elements. Gradients at the same addresses get
    the table of before; a new one is copied from pinned memory, for which the host does not wait.
    """
    places = tuple(
        (begin, grad.numel(), grad.data_ptr())
        for grad, begin in zip(grads, offsets, strict=True)
        if grad.numel() > 0
    )
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if on_gpu else None
    # A table that is made while a graph is captured lies in the graph's memory.
    is_captured = on_gpu and torch.cuda.is_current_stream_capturing()
    table = (_new_table.__wrapped__ if is_captured else _new_table)(places, numel, device, stream)
    return table, len(table)


@functools.lru_cache(maxsize=256)
def _new_table(
    places: tuple[tuple[int, int, int], ...],
    numel: int,
    device: torch.device,
    stream: torch.cuda.Stream | None,  # the current one: the table is written and read there
) -> Tensor:
    rows, end = [], 0
    for begin, size, address in places:
        if begin > end:
            rows.append((end, 0))
        rows.append((begin, address))
        end = begin + size
    if end < numel:
        rows.append((end, 0))
    num_rows = 1 << len(rows).bit_length()
    rows += [(numel, 0)] * (num_rows - len(rows))
    table = torch.tensor(rows, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def grad_factor(maximize: bool, grad_scale: Tensor | None) -> float | Tensor:
    """Return what gradients are multiplied by, as a kernel argument."""
    sign = -1.0 if maximize else 1.0
    return sign if grad_scale is None else argument(sign * (1 / grad_scale.double()))
