"""Argument checks of the public functions, with their error messages.

Direct calls of ``torch.ops.pyparallel`` have only the checks in ``csrc``: what memory safety needs,
each with a short message.
"""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, float64
from torch import bfloat16 as _bfloat16
from torch import float16 as _float16
from torch import float32 as _float32
from torch._subclasses.fake_tensor import FakeTensor

FLOAT_DTYPES = (_float32, _bfloat16, _float16)
_LENGTH = operator.attrgetter("nbytes")
_BUFFER_RULE = "a contiguous 1-d tensor of float32, bfloat16 or float16"


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype, shape, device and layout, as printed in errors."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
    text += f" on {tensor.device}"
    return text if tensor.is_contiguous() else text + ", not contiguous"


def check_buffer(name: str, tensor: Tensor) -> None:
    """Raise unless the tensor is contiguous, 1-d and of a supported dtype."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be {_BUFFER_RULE}, got {describe(tensor)}")


def are_float64(tensors: Sequence[Tensor]) -> bool:
    """Return whether all are float64, of one shape and on one device; no kernel takes those."""
    first = tensors[0]
    return all(
        tensor.dtype == float64 and tensor.shape == first.shape and tensor.device == first.device
        for tensor in tensors
    )


def check_like(name: str, tensor: Tensor, model_name: str, model: Tensor) -> None:
    """Raise unless the tensor is a buffer with the model's length and device."""
    if not _are_like(model, (tensor,)):
        raise ValueError(
            f"{name} must be {_BUFFER_RULE} with {model_name}'s length and device "
            f"({describe(model)}), got {describe(tensor)}"
        )


def check_all_like(
    tensors: dict[str, Tensor], messages: Sequence[Tensor], model_name: str, model: Tensor
) -> None:
    """Raise unless all tensors, by name, and messages are buffers like the model, of one dtype."""
    if not _are_like(model, (*tensors.values(), *messages)):
        for name, tensor in {**tensors, **by_index("messages", messages)}.items():
            check_like(name, tensor, model_name, model)
    check_one_dtype("messages", messages)


def by_index(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors by their names in errors."""
    return {f"{name}[{index}]": tensor for index, tensor in enumerate(tensors)}


def check_doubles(
    name: str, tensor: Tensor, shape: tuple[int, ...], model: Tensor, model_name: str = "z"
) -> None:
    """Raise unless masses or weights are contiguous float64 of this shape on the model's device."""
    check_tensor(name, tensor, float64, shape, model.device, f"{model_name}'s device")


def has_memory(tensor: Tensor) -> bool:
    """Return whether the values can be read: tensors have none while tracing."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


def are_apart(tensors: Sequence[Tensor]) -> bool:
    """Return whether no two contiguous tensors with memory overlap; this must be cheap."""
    end = 0
    for begin, length in sorted(
        zip(map(Tensor.data_ptr, tensors), map(_LENGTH, tensors), strict=True)
    ):
        if begin < end:
            return False
        end = begin + length
    return True


def check_written(tensors: Sequence[tuple[str, Tensor, bool]], in_place: bool) -> None:
    """Raise if a tensor must not be written, or overlaps what the same pass reads or writes.

    Each contiguous tensor comes with its name in errors, and whether it is written. ``in_place``
    lets a written one be another: the same entries of the same dtype. What torch's in-place
    functions refuse is a RuntimeError, an overlap a ValueError.
    """
    for name, tensor, is_written in tensors:
        if is_written and tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} must not require grad: a leaf Variable that requires grad is being used "
                "in an in-place operation; call the op under torch.no_grad()"
            )
        if is_written and tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{name} must not be an inference tensor: inplace update to inference tensor "
                "outside InferenceMode is not allowed; clone it outside of torch.inference_mode()"
            )
    for i, (name, tensor, is_written) in reversed(list(enumerate(tensors))):
        begin, length = tensor.data_ptr(), tensor.nbytes
        for j, (other_name, other, is_other_written) in enumerate(tensors):
            start = other.data_ptr()
            common = min(begin + length, start + other.nbytes) - max(begin, start)
            if not is_written or common <= 0 or j == i or (is_other_written and j > i):
                continue
            is_same = common == length == other.nbytes and tensor.dtype == other.dtype
            if not (in_place and is_same):
                raise ValueError(
                    f"{name} must not overlap {other_name}, got {common} bytes in common"
                )


def check_scalar(name: str, tensor: Tensor, model: Tensor) -> None:
    """Raise unless the tensor is 0-d, on the CPU or the model's device."""
    if tensor.dim() != 0 or not (tensor.is_cpu or tensor.device == model.device):
        raise ValueError(
            f"{name} must be a number, or a 0-d tensor on the cpu or param's device, "
            f"got {describe(tensor)}"
        )


def check_one_dtype(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise if the tensors have different dtypes."""
    for tensor in tensors[1:]:
        if tensor.dtype != tensors[0].dtype:
            first, other = (str(t.dtype).removeprefix("torch.") for t in (tensors[0], tensor))
            raise ValueError(f"{name} must have one dtype, got {first} and {other}")


def _are_like(model: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return whether all are buffers with the model's length and device; this must be cheap."""
    numel, device = model.numel(), model.device
    for tensor in tensors:
        if not (
            tensor.dim() == 1
            and tensor.numel() == numel
            and tensor.dtype in FLOAT_DTYPES
            and tensor.is_contiguous()
            and tensor.device == device
        ):
            return False
    return True


def check_block_size(block_size: int, name: str = "block_size") -> None:
    """Raise unless the block size is one the kernels support."""
    if not (32 <= block_size <= 4096 and block_size & (block_size - 1) == 0):
        raise ValueError(f"{name} must be a power of two from 32 to 4096, got {block_size}")


def num_blocks(numel: int, block_size: int) -> int:
    """Return the number of blocks, and thus scales; the last block may be short."""
    return -(-numel // block_size)


def check_tensor(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    where: str = "",
    or_cpu: bool = False,
) -> None:
    """Raise unless the tensor is contiguous, of this dtype, shape and device, called ``where``."""
    fits = tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()
    if not (fits and (tensor.device == device or (or_cpu and tensor.is_cpu))):
        if or_cpu and device.type != "cpu":
            where = f"{device} or cpu"
        kind = str(dtype).removeprefix("torch.")
        rule = f"contiguous {kind} tensor of shape {list(shape)}" if shape else f"0-d {kind} tensor"
        raise ValueError(f"{name} must be a {rule} on {where or device}, got {describe(tensor)}")


def check_rows(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    """Raise unless the tensor is of this dtype, shape and device; its rows may lie apart."""
    fits = tensor.dtype == dtype and tensor.shape == shape and tensor.device == device
    if not (fits and (shape[1] < 2 or tensor.stride(1) == 1) and tensor.stride(0) >= shape[1]):
        kind = str(dtype).removeprefix("torch.")
        rule = f"{kind} of shape {list(shape)} with contiguous rows on {device}"
        raise ValueError(f"{name} must be {rule}, got {describe(tensor)}")


def output(out: Tensor | None, numel: int, accumulate: bool, device: torch.device) -> Tensor:
    """Return the buffer that an op decodes into: the one given, or a new one of float32."""
    check_at_least("numel", numel, 0)
    if out is None:
        if accumulate:
            raise ValueError("out must be given to accumulate, got None")
        return torch.empty(numel, dtype=_float32, device=device)
    check_buffer("out", out)
    if out.numel() != numel:
        raise ValueError(f"out must be of length numel, {numel}, got {out.numel()}")
    return out


Number = float | int | Tensor


def as_scalar(name: str, number: Number, model: Tensor) -> Tensor:
    """Return a 0-d float64 tensor; one on the model's device stays there and is not read."""
    if not isinstance(number, Tensor):
        return torch.scalar_tensor(number, dtype=float64, device="cpu")
    check_scalar(name, number, model)
    return number if number.dtype == float64 else number.to(float64)


def check_at_least(name: str, number: Number, low: float) -> None:
    """Raise if a Python number is too small; tensors are not read."""
    if not isinstance(number, Tensor) and not number >= low:
        raise ValueError(f"{name} must be at least {low}, got {number}")


def require(name: str, rule: str, number: Number, holds: bool | Tensor) -> None:
    """Raise if a Python number breaks a rule; tensors are not read."""
    if not isinstance(number, Tensor) and not holds:
        raise ValueError(f"{name} must be {rule}, got {number}")


def check_replicas(
    replicas: Sequence[Tensor], names: Callable[[], Sequence[str]], z: Tensor
) -> None:
    """Raise unless all are buffers of z's length, dtype and device."""
    fits = _are_like(z, replicas)
    for replica in replicas:
        fits = fits and replica.dtype == z.dtype
    if not fits:
        for name, replica in zip(names(), replicas, strict=True):
            check_like(name, replica, "z", z)
            if replica.dtype != z.dtype:
                rule = f"of z's dtype ({describe(z)})"
                raise ValueError(f"{name} must be {rule}, got {describe(replica)}")
