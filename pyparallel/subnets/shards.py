"""The rows of the full model, and of its optimizer's state, that this rank stores."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm import Collectives
from ..training import check_like
from ..training.arguments import require
from .exchange import CutTensor
from .partition.tensor_cut import TensorCut
from .placement import Placement

States = Mapping[str, Mapping[str, Tensor]]


@dataclass(eq=False)
class ModelShards:
    """Rows of dimension 0 of every tensor that is cut; all subnets hold the other tensors in full.

    ``enlargement`` has by name the factor of stored weights over those in ``tensors``.
    """

    cuts: Mapping[str, TensorCut]
    tensors: InitVar[Mapping[str, Tensor]]
    placement: Placement
    collectives: Collectives
    enlargement: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._rows = {
            name: tensors[name].detach()[self._owned(cut, self.collectives.rank)].clone()
            for name, cut in self.cuts.items()
        }
        for name, times in self.enlargement.items():
            self._rows[name].mul_(times)
        self._states: dict[str, dict[str, Tensor]] = {name: {} for name in self.cuts}

    def cut_tensors(self, parts: Mapping[str, Tensor]) -> list[CutTensor]:
        """Return the weights to exchange, given the subnet's own by name."""
        return [CutTensor(name, self._rows[name], parts[name]) for name in self.cuts]

    def state_tensors(self, states: States) -> list[CutTensor]:
        """Return the optimizer state to exchange, given the subnet's own by name and key."""
        return [
            CutTensor(name, self._state_rows(name, key, part), part)
            for name in self.cuts
            for key, part in states.get(name, {}).items()
        ]

    def init_states(self, states: States) -> None:
        """Fill the stored rows of the optimizer's state with its values before the first step.

        Those that a step adds start at zero. Values that differ in a tensor are a ValueError.
        """
        for tensor in self.state_tensors(states):
            values, got = tensor.part.unique(), f"several for {tensor.name}"
            rule = "optimizer state before the first step must be one number for all entries of a"
            require(values.numel() < 2, f"{rule} parameter", got, "use ResetState()")
            if values.numel():
                tensor.rows.fill_(values[0])

    @torch.no_grad()
    def gather_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite full tensors, by name, with the rows of all owners; all ranks call it."""
        for dtype in {tensors[name].dtype: None for name in self.cuts}:
            names = [name for name in self.cuts if tensors[name].dtype == dtype]
            for owner in range(self.collectives.size):
                targets = [tensors[name][self._owned(self.cuts[name], owner)] for name in names]
                if owner == self.collectives.rank:
                    flat = torch.cat([self._rows[name].reshape(-1) for name in names])
                else:
                    flat = targets[0].new_empty(sum(target.numel() for target in targets))
                self.collectives.broadcast_(flat, owner)
                pieces = flat.split([target.numel() for target in targets])
                for target, piece in zip(targets, pieces, strict=True):
                    target.copy_(piece.view(target.shape))
        for name, times in self.enlargement.items():
            tensors[name].div_(times)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and states; the tensors are not copied."""
        return {
            "rows": dict(self._rows),
            "states": {name: dict(states) for name, states in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Overwrite the rows and states with saved ones."""
        for name, rows in self._rows.items():
            rows.copy_(state["rows"][name])
        self._states = {
            name: {key: rows.to(self._rows[name].device, copy=True) for key, rows in them.items()}
            for name, them in state["states"].items()
        }

    def check_state(self, state: Mapping[str, Any], path: str) -> None:
        """Raise a ValueError with the path of what ``load_state_dict`` cannot load."""
        check_like(state["rows"], self._rows, f"{path}.rows")
        if state["states"].keys() != self._rows.keys():
            raise ValueError(f"{path}.states must be of {sorted(self._rows)}")
        for name, states in state["states"].items():
            for key, rows in states.items():
                own = self._rows[name].to(rows.dtype)
                check_like(rows, own, f"{path}.states.{name}.{key}")

    def _state_rows(self, name: str, key: str, part: Tensor) -> Tensor:
        states = self._states[name]
        if key not in states:
            states[key] = torch.zeros_like(self._rows[name], dtype=part.dtype)
        return states[key]

    def _owned(self, cut: TensorCut, owner: int) -> slice:
        rows = self.placement.rows(cut.shape[0], owner, self.collectives.size)
        return slice(rows.start, rows.stop)
