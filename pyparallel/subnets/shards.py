"""The whole model at rest: the rows of it that this rank owns, and of its optimizer's state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .collectives import SubnetCollectives
from .exchange import CutTensor
from .partition.tensor_cut import TensorCut
from .placement import Placement

States = Mapping[str, Mapping[str, Tensor]]


class ModelShards:
    """Rows of dimension 0 of every tensor that is cut; what is not, all subnets have.

    Args:
        cuts: of the tensors, by name.
        tensors: the whole ones: the rows are copied from them.
        placement: which rows are this rank's.
        members: the ranks.
        enlarged: by name, how many times larger tensors rest, as in the subnets.
    """

    def __init__(
        self,
        cuts: Mapping[str, TensorCut],
        tensors: Mapping[str, Tensor],
        placement: Placement,
        members: SubnetCollectives,
        enlarged: Mapping[str, int] | None = None,
    ) -> None:
        self._cuts = cuts
        self._enlarged = enlarged or {}
        self._placement = placement
        self._members = members
        self._rows = {
            name: tensors[name].detach()[self._owned(cut, members.rank)].clone()
            for name, cut in cuts.items()
        }
        for name, times in self._enlarged.items():
            self._rows[name].mul_(times)
        self._states: dict[str, dict[str, Tensor]] = {name: {} for name in cuts}

    def items(self, parts: Mapping[str, Tensor]) -> list[CutTensor]:
        """What travels of the weights, with the subnet's own by name."""
        return [CutTensor(name, self._rows[name], parts[name]) for name in self._cuts]

    def state_items(self, states: States) -> list[CutTensor]:
        """What travels of the optimizer's state, with the subnet's own by name and key."""
        return [
            CutTensor(name, self._state_rows(name, key, part), part)
            for name in self._cuts
            for key, part in states.get(name, {}).items()
        ]

    def begin_states(self, states: States) -> None:
        """Let entries of the optimizer's state that no subnet has had yet be its first ones.

        Args:
            states: before the first step; what comes later begins with zero.

        Raises:
            ValueError: entries of one tensor differ, and what the others would be is not known.
        """
        for item in self.state_items(states):
            values = item.part.unique()
            if values.numel() > 1:
                raise ValueError(
                    "optimizer state before the first step must be one number for all entries of "
                    f"a parameter, got several for {item.name}; use ResetState()"
                )
            if values.numel():
                item.rows.fill_(values[0])

    @torch.no_grad()
    def write_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Let whole tensors, by name, have the rows of all owners; all ranks call it together."""
        for dtype in {tensors[name].dtype: None for name in self._cuts}:
            names = [name for name in self._cuts if tensors[name].dtype == dtype]
            for owner in range(self._members.size):
                targets = [tensors[name][self._owned(self._cuts[name], owner)] for name in names]
                if owner == self._members.rank:
                    flat = torch.cat([self._rows[name].reshape(-1) for name in names])
                else:
                    flat = targets[0].new_empty(sum(target.numel() for target in targets))
                self._members.broadcast_(flat, owner)
                pieces = flat.split([target.numel() for target in targets])
                for target, piece in zip(targets, pieces, strict=True):
                    target.copy_(piece.view(target.shape))
        for name, times in self._enlarged.items():
            tensors[name].div_(times)

    def state_dict(self) -> dict[str, Any]:
        """The rows; the tensors are the live ones."""
        return {
            "rows": dict(self._rows),
            "states": {name: dict(states) for name, states in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these rows."""
        for name, rows in self._rows.items():
            rows.copy_(state["rows"][name])
        self._states = {
            name: {key: rows.to(self._rows[name].device, copy=True) for key, rows in them.items()}
            for name, them in state["states"].items()
        }

    def _state_rows(self, name: str, key: str, part: Tensor) -> Tensor:
        states = self._states[name]
        if key not in states:
            states[key] = torch.zeros_like(self._rows[name], dtype=part.dtype)
        return states[key]

    def _owned(self, cut: TensorCut, owner: int) -> slice:
        rows = self._placement.rows(cut.shape[0], owner, self._members.size)
        return slice(rows.start, rows.stop)
