"""What every saved state carries: a format number and checksums; and how a state is checked."""

import copy
import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .arguments import require, summarize

FORMAT_KEY = "format"
FORMAT = 3
CHECKSUMS_KEY = "checksums"

_WORDS = 1024  # of 8 bytes, summed into one: 0.1 % of a tensor's bytes are hashed on the host


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state with the format number and checksums, in place of those it has.

    A state is of dicts, lists and tuples of tensors, numbers, strings and None; tensors are copied
    into the memory of the CPU. A tensor has a checksum by its path, such as ``module.0.weight``;
    all else (keys, types, values, dtypes, shapes) has one together.
    """
    copies: dict[int, Any] = {}
    _copy_tensors(state, copies)
    copied = {key: copy.deepcopy(each, copies) for key, each in state.items()}
    leaves = _without_checksums({**copied, FORMAT_KEY: FORMAT})
    tensors = {path: checksum(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)}
    checksums = {"tensors": tensors, "others": _checksum_of_others(leaves)}
    return {**copied, FORMAT_KEY: FORMAT, CHECKSUMS_KEY: checksums}


def check_format(state: Mapping[str, Any]) -> None:
    """Check that this version of pyparallel can load a saved state, and that it is undamaged.

    The ValueError names the path of what differs from what was saved.
    """
    saved = state.get(FORMAT_KEY)
    rule = f"the state's format must be {FORMAT}, that of this version of pyparallel"
    fix = "load it with the version that has saved it"
    require(type(saved) is int and saved == FORMAT, rule, summarize(saved), fix)
    if CHECKSUMS_KEY not in state:
        raise ValueError("the state must have checksums, got none: the file is damaged")
    checksums = state[CHECKSUMS_KEY]
    leaves = _without_checksums(state)
    if _checksum_of_others(leaves) != checksums["others"]:
        raise ValueError(
            "a key, a number or a shape of the state is not what was saved: the file is damaged, "
            "or the state was changed (after which pyparallel.training.seal() is due)"
        )
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and checksum(leaf) != checksums["tensors"].get(path):
            raise ValueError(
                f"the tensor {path} has other bits than when it was saved: the file is damaged, or "
                "the state was changed (after which pyparallel.training.seal() is due)"
            )


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bytes in row-major order, which every bit changes.

    Sums of 64-bit words are taken on the tensor's device, and copied to the host and hashed.
    """
    # Of a DTensor, whose module takes long to import, this rank's part.
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
    dense = local if local.layout == torch.strided else local.to_dense()
    dense = dense.resolve_conj().resolve_neg().contiguous()
    # The stride of a single element may be any.
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()  # a view as int64 must be aligned
    num_words = flat.numel() // 8
    words, rest = flat[: num_words * 8].view(torch.int64), flat[num_words * 8 :]
    num_rows = num_words // _WORDS
    rows = words[: num_rows * _WORDS].view(num_rows, _WORDS).sum(1)
    last = words[num_rows * _WORDS :].sum()
    parts = torch.cat([rows, last.reshape(1), rest.long()])
    hashed = hashlib.blake2b(parts.cpu().numpy().tobytes(), digest_size=8)
    return int.from_bytes(hashed.digest(), "little")


def _copy_tensors(value: Any, copies: dict[int, Any]) -> None:
    """Put copies of the tensors where ``copy.deepcopy`` looks for what it has copied."""
    if isinstance(value, Tensor):
        copies[id(value)] = value.detach().to("cpu", copy=True)
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            _copy_tensors(each, copies)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return the leaves of a nested state by path, in an order without regard to insertion."""
    if isinstance(value, Mapping) and value:
        for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
            yield from _leaves(value[key], f"{path}.{key}" if path else str(key))
            yield f"{path}.{key}", type(key).__name__
    elif isinstance(value, list | tuple) and value:
        yield path, f"list of {len(value)}"
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}")
    else:
        yield path, value


def _without_checksums(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(_leaves({key: each for key, each in state.items() if key != CHECKSUMS_KEY}))


def _checksum_of_others(leaves: list[tuple[str, Any]]) -> int:
    crc = 0
    for path, leaf in leaves:
        crc = zlib.crc32(f"{path}\0{_describe_leaf(leaf)}\n".encode(errors="replace"), crc)
    return crc


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        kind = str(leaf.dtype).removeprefix("torch.")
        return f"a {kind} tensor of shape {list(leaf.shape)} {leaf.requires_grad}"
    if isinstance(leaf, float):  # also numpy's, whose repr depends on its version
        return f"float {float(leaf).hex()} {math.isnan(leaf)}"
    if leaf is None or isinstance(leaf, bool | int | str | bytes | complex | torch.dtype):
        return f"{type(leaf).__name__} {leaf!r}"
    if isinstance(leaf, Mapping | list | tuple):
        return f"empty {'mapping' if isinstance(leaf, Mapping) else 'list'}"
    if isinstance(leaf, set | frozenset):
        return f"set {sorted(map(repr, leaf))}"
    return type(leaf).__name__  # such as a scheduler's function, whose repr may be an address
