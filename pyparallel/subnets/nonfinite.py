"""Tensors with a nan or an inf, found before a merge."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..training.nonfinite import is_finite_on_device

States = Mapping[str, Mapping[str, Tensor]]


def first_nonfinite(parts: Mapping[str, Tensor], states: States, device: torch.device) -> Tensor:
    """Return the index of the first tensor to be merged that is not finite, (1,) int64, or -1.

    Reads all of them once: the subnet's tensors, and the state that moves with them. Buffers may
    have an inf, as masks do, but no nan.
    """
    verdicts = []
    for _, each in _merged(parts, states):
        is_parameter = isinstance(each, nn.Parameter) or each.requires_grad
        verdicts.append(is_finite_on_device(each.detach(), allow_inf=not is_parameter))
    if not verdicts:
        return torch.full((1,), -1, device=device)
    is_bad = torch.stack(verdicts).logical_not()
    first = is_bad.long().argmax()
    return torch.where(is_bad.any(), first, -1).view(1).to(device)


def name_of(index: int, parts: Mapping[str, Tensor], states: States) -> str:
    """Return the name that an index of `first_nonfinite` stands for."""
    return [name for name, _ in _merged(parts, states)][index]


def _merged(parts: Mapping[str, Tensor], states: States) -> Iterator[tuple[str, Tensor]]:
    for name, part in parts.items():
        yield name, part
        for key, state in states.get(name, {}).items():
            yield f"the optimizer's {key} of {name}", state
