"""What every saved state carries: a format number and checksums; and how a state is checked."""

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arguments import summarize

FORMAT_KEY = "format"
FORMAT = 2  # 1 has no checksums; states that were saved before there was a number load as 1
CHECKSUMS_KEY = "checksums"

_WORDS = 1024  # of 8 bytes, summed into one: 0.1 % of a tensor's bytes are hashed on the host
# What the optimizers of torch, and then a pipeline, keep in the shape of the parameter.
_OF_PARAMETERS_SHAPE = {
    *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"),
    *("last_gradient", "last_weights", "last_uncorrected_update", "average_change"),
}


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the format number and its checksums, in place of those that it has.

    A tensor has one by its path, such as ``module.0.weight``; all else (keys, types, values,
    dtypes, shapes) has one together.

    Args:
        state: dicts, lists and tuples of tensors, numbers, strings and None.
    """
    sealed = {**state, FORMAT_KEY: FORMAT}
    sealed.pop(CHECKSUMS_KEY, None)
    leaves = list(_leaves(sealed))
    tensors = {path: checksum(leaf) for path, leaf in leaves if isinstance(leaf, Tensor)}
    return {**sealed, CHECKSUMS_KEY: {"tensors": tensors, "others": _checksum_of_others(leaves)}}


def check_format(state: Mapping[str, Any]) -> None:
    """Check that this version of pyparallel can load a saved state, and that it is undamaged.

    States of format 1 have no checksums.

    Raises:
        ValueError: a newer version has saved it; or it differs from what was saved, by its path.
    """
    saved = state.get(FORMAT_KEY, 1)
    if not isinstance(saved, int) or not 1 <= saved <= FORMAT:
        raise ValueError(
            f"the state's format must be at most {FORMAT}, got {saved!r}: a newer pyparallel has "
            "saved it; upgrade pyparallel to load it"
        )
    if saved == 1 and CHECKSUMS_KEY not in state:
        return
    if CHECKSUMS_KEY not in state:
        raise ValueError("the state must have checksums, got none: the file is damaged")
    checksums = state[CHECKSUMS_KEY]
    leaves = list(_leaves({key: each for key, each in state.items() if key != CHECKSUMS_KEY}))
    if _checksum_of_others(leaves) != checksums["others"]:
        raise ValueError(
            "a key, a number or a shape of the state is not what was saved: the file is damaged, "
            "or the state was changed (after which pyparallel.comm.seal() is due)"
        )
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and checksum(leaf) != checksums["tensors"].get(path):
            raise ValueError(
                f"the tensor {path} has other bits than when state_dict() was called: the file is "
                "damaged, a step was taken before it was written, or the state was changed (after "
                "which pyparallel.comm.seal() is due)"
            )


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bytes in row-major order, which every bit changes.

    Sums of 64-bit words modulo 2**64 are taken on the tensor's device; they, not the tensor, are
    copied to the host and hashed. Unlike the exclusive or of ``torch.hash_tensor`` a sum also
    differs if an even number of equal words is lost.
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


def check_on_all_ranks(
    check: Callable[[], list[tuple[str, str]]],
    agree: Callable[[list[tuple[str, str]], str | None], None],
) -> None:
    """Check this rank's state, and raise on all ranks alike if that of any cannot be loaded.

    Args:
        check: raises an error, of any type, if the state cannot be loaded; returns what must be
            equal on all ranks, such as its step.
        agree: ``check_consistent_across_ranks`` on the group.

    Raises:
        DisagreementError: (a ValueError) on all ranks.
    """
    fields: list[tuple[str, str]] = []
    problem = None
    try:
        fields = check()
    except ValueError as error:
        problem = str(error)
    except Exception as error:  # the state may be anything; `agree` raises it on all ranks
        reason = f"without {error}" if isinstance(error, KeyError) else f"{error}"
        problem = f"state_dict must be a whole result of state_dict(), got one {reason}"
    agree(fields, problem)


def check_like(saved: Any, own: Any, path: str) -> None:
    """Check that a saved value has the keys, lengths, types, shapes and dtypes of one's own.

    Where one's own is None or empty there is nothing to compare with. Numbers that count, which are
    at least 0 here, must be so.

    Raises:
        ValueError: names the path.
    """
    if own is None or (isinstance(own, Mapping | list | tuple) and not own):
        return
    if isinstance(own, Tensor):
        if not (isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (own.shape, own.dtype)):
            raise ValueError(f"{path} must be {_describe(own)}, got {_describe(saved)}")
    elif isinstance(own, Mapping):
        if not isinstance(saved, Mapping) or saved.keys() != own.keys():
            raise ValueError(f"{path} must be {summarize(own)}, got {summarize(saved)}")
        # A module's extra state may be anything.
        for key in (each for each in own if not str(each).endswith("_extra_state")):
            check_like(saved[key], own[key], f"{path}.{key}")
    elif isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(own):
            raise ValueError(f"{path} must be a list of {len(own)}, got {summarize(saved)}")
        for index, value in enumerate(own):
            check_like(saved[index], value, f"{path}.{index}")
    elif type(own) is int:
        if type(saved) is not int or saved < 0 <= own:
            raise ValueError(f"{path} must be an integer, at least 0, got {summarize(saved)}")
    elif not isinstance(saved, (int, float) if isinstance(own, float) else type(own)):
        raise ValueError(f"{path} must be of type {type(own).__name__}, got {summarize(saved)}")


def optimizer_kind(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, by which its state is known."""
    return type(optimizer).__name__


def check_optimizer_state(optimizer: Optimizer, saved: Any, kind: str | None, path: str) -> None:
    """Check that an optimizer can load a state, which need not have its hyperparameters.

    Args:
        optimizer: not changed.
        saved: a result of its ``state_dict()``.
        kind: ``optimizer_kind`` of the one that was saved; None: it was not recorded.
        path: of the state, for errors.

    Raises:
        ValueError: names what is of another optimizer, or of other parameters.
    """
    mine = optimizer_kind(optimizer)
    groups = saved["param_groups"]
    if kind not in (None, mine):
        raise ValueError(f"state_dict must be of the same optimizer, {mine}, got {kind}")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in groups] != sizes:
        raise ValueError(
            f"{path} must have parameter groups of {sizes} parameters, got "
            f"{[len(group['params']) for group in groups]}"
        )
    for name, default in optimizer.defaults.items() if kind is None else ():
        is_number = isinstance(default, float | int | tuple | Tensor)
        if is_number and not isinstance(default, bool) and any(name not in g for g in groups):
            raise ValueError(
                f"state_dict must be of the same optimizer, {mine}, got one whose parameter groups "
                f"have no {name}"
            )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            where = f"{path}.state.{number}.{key}"
            own = optimizer.state[parameter].get(key) if parameter in optimizer.state else None
            if isinstance(own, Tensor) or key in _OF_PARAMETERS_SHAPE:
                shape = own.shape if isinstance(own, Tensor) else parameter.shape
                if not (value is None or (isinstance(value, Tensor) and value.shape == shape)):
                    raise ValueError(
                        f"{where} must be a tensor of shape {list(shape)}, got {summarize(value)}"
                    )
            is_number = isinstance(value, int | float) or (
                isinstance(value, Tensor) and value.numel() == 1
            )
            if key == "step" and is_number and not 0 <= float(value) < math.inf:
                raise ValueError(f"{where} must be at least 0, got {float(value)}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return the leaves of a nested state by path, in an order that does not depend on insertion.

    An empty container is a leaf; the type of a key is part of what a leaf says.
    """
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


def _checksum_of_others(leaves: list[tuple[str, Any]]) -> int:
    crc = 0
    for path, leaf in leaves:
        crc = zlib.crc32(f"{path}\0{_describe_leaf(leaf)}\n".encode(errors="replace"), crc)
    return crc


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{_describe(leaf)} {leaf.requires_grad}"
    if isinstance(leaf, float):  # also numpy's, whose repr depends on its version
        return f"float {float(leaf).hex()} {math.isnan(leaf)}"
    if leaf is None or isinstance(leaf, bool | int | str | bytes | complex | torch.dtype):
        return f"{type(leaf).__name__} {leaf!r}"
    if isinstance(leaf, Mapping | list | tuple):
        return f"empty {'mapping' if isinstance(leaf, Mapping) else 'list'}"
    if isinstance(leaf, set | frozenset):
        return f"set {sorted(map(repr, leaf))}"
    return type(leaf).__name__  # such as a scheduler's function, whose repr may be an address


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return summarize(value)
