"""States of flat buffers, loaded into buffers that hold the parameters in another order."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Places = dict[str, int]
"""The pieces of a buffer in order: name and number of entries."""


def relayout(states: Sequence[Any], saved: Sequence[Places], places: Sequence[Places]) -> list[Any]:
    """Return the states of buffers for other buffers, entry by entry by parameter name.

    Args:
        states: one for each saved buffer, of one structure: tensors as long as the buffer follow
            the parameters, dicts by parameter name likewise, all else is equal in all of them.
        saved: the pieces of each saved buffer.
        places: the pieces of each buffer here.

    Raises:
        ValueError: a parameter is missing, or the states are unequal in something else.
    """
    home = {name: index for index, each in enumerate(saved) for name in each}
    missing = [name for each in places for name in each if not _is_gap(name) and name not in home]
    if missing:
        raise ValueError(
            f"the saved state must hold all parameters, got one without {missing[0]!r}"
        )
    return [_gather(states, saved, each, home) for each in places]


def _gather(
    nodes: Sequence[Any], saved: Sequence[Places], places: Places, home: Mapping[str, int]
) -> Any:
    first = nodes[0]
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in nodes):  # by parameter name
            merged = {name: value for each in nodes for name, value in each.items()}
            return {name: merged[name] for name in places if name in merged}
        return {key: _gather([n[key] for n in nodes], saved, places, home) for key in first}
    if isinstance(first, list | tuple):
        columns = zip(*nodes, strict=True)
        return [_gather(column, saved, places, home) for column in columns]
    if _are_flat(nodes, saved):
        return _join(nodes, saved, places, home)
    if isinstance(first, Tensor):
        if not all(torch.equal(first, each) for each in nodes):
            raise ValueError(
                "the saved state must be equal in all buffers, got unequal weights: a neighbor had "
                "failed; load it with the optimizer it was saved with"
            )
        return first.clone()
    return first


def _are_flat(nodes: Sequence[Any], saved: Sequence[Places]) -> bool:
    """Return whether tensors are as long as their buffers; float64 ones are masses."""
    return all(
        isinstance(node, Tensor)
        and node.dtype != torch.float64
        and tuple(node.shape) == (sum(each.values()),)
        for node, each in zip(nodes, saved, strict=True)
    )


def _join(
    nodes: Sequence[Tensor], saved: Sequence[Places], places: Places, home: Mapping[str, int]
) -> Tensor:
    parts = []
    for name, numel in places.items():
        if _is_gap(name):
            parts.append(nodes[0].new_zeros(numel))
            continue
        source = saved[home[name]]
        names = list(source)
        begin = sum(source[each] for each in names[: names.index(name)])
        parts.append(nodes[home[name]][begin : begin + numel])
    return torch.cat([part.to(parts[0].dtype) for part in parts])


def _is_gap(name: str) -> bool:
    return name.startswith("gap ")
