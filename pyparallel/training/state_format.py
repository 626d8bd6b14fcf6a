"""What every saved state carries: a format number and checksums; and how a state is checked."""

import copy
import hashlib
import math
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from .arguments import require, summarize
from .state_checks import describe

FORMAT_KEY = "format"
FORMAT = 3
CHECKSUMS_KEY = "checksums"

_WORDS = 1024  # of 8 bytes, summed into one: 0.1 % of a tensor's bytes are hashed on the host


class _LiveState(dict[str, Any]):
    """A state whose checksums are taken when it is written, of what ``collect`` returns."""

    def __init__(self, content: Mapping[str, Any], collect: Callable[[], Mapping[str, Any]]):
        super().__init__({**content, FORMAT_KEY: FORMAT})
        self._collect, self._others = collect, _checksum_of_others(_without_checksums(self))
        self[CHECKSUMS_KEY] = _Checksums(self)

    def freeze(self) -> dict[str, Any]:
        """Return the state of now, with its checksums; tensors are not copied."""
        if newer := {**self._collect()}:
            others = _checksum_of_others(_without_checksums({**newer, FORMAT_KEY: FORMAT}))
            if others != self._others:  # else what a user has changed stays
                self.update(newer)  # a step was taken
                self._others = others
        leaves = _without_checksums(self)
        tensors = {path: checksum(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)}
        return {**self, CHECKSUMS_KEY: {"tensors": tensors, "others": _checksum_of_others(leaves)}}

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.freeze(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The one mapping that torch.load(weights_only=True) makes by a call.
        return OrderedDict, (), None, None, iter(self.freeze().items())


class _Checksums:
    """The entry of the checksums, for what writes entries one by one, as DCP does."""

    def __init__(self, state: _LiveState) -> None:
        self._state = weakref.ref(state)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if (state := self._state()) is None:
            raise RuntimeError(
                "a changed copy of a state must have checksums of its own: "
                "pyparallel.training.seal() is due"
            )
        return OrderedDict, (), None, None, iter(state.freeze()[CHECKSUMS_KEY].items())


def _flatten(state: _LiveState) -> tuple[list[Any], list[str]]:
    frozen = state.freeze()
    return list(frozen.values()), list(frozen)


# torch's trees know plain dicts alone.
register_pytree_node(
    _LiveState, _flatten, lambda values, keys: dict(zip(keys, values, strict=True))
)


def seal(state: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return a state with the format number and its checksums, in place of those that it has.

    The checksums are taken when the state is written or copied. A tensor has one by its path, such
    as ``module.0.weight``; all else (keys, types, values, dtypes, shapes) has one together.

    A state is of dicts, lists and tuples of tensors, numbers, strings and None; or a function that
    returns one, called again before it is written: then numbers are live too, as tensors are. It
    returns {} if they are to stay as they are.
    """
    return _LiveState(state(), state) if callable(state) else _LiveState(state, dict)


def check_format(state: Mapping[str, Any]) -> None:
    """Check that this version of pyparallel can load a saved state, and that it is undamaged.

    One that was never written has no checksums yet. The ValueError names the path of what differs
    from what was saved.
    """
    saved = state.get(FORMAT_KEY)
    rule = f"the state's format must be {FORMAT}, that of this version of pyparallel"
    require(type(saved) is int and saved == FORMAT, rule, summarize(saved))
    if CHECKSUMS_KEY not in state:
        raise ValueError("the state must have checksums, got none: the file is damaged")
    checksums = state[CHECKSUMS_KEY]
    if isinstance(checksums, _Checksums):  # it was never written
        return
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
        return f"{describe(leaf)} {leaf.requires_grad}"
    if isinstance(leaf, float):  # also numpy's, whose repr depends on its version
        return f"float {float(leaf).hex()} {math.isnan(leaf)}"
    if leaf is None or isinstance(leaf, bool | int | str | bytes | complex | torch.dtype):
        return f"{type(leaf).__name__} {leaf!r}"
    if isinstance(leaf, Mapping | list | tuple):
        return f"empty {'mapping' if isinstance(leaf, Mapping) else 'list'}"
    if isinstance(leaf, set | frozenset):
        return f"set {sorted(map(repr, leaf))}"
    return type(leaf).__name__  # such as a scheduler's function, whose repr may be an address
