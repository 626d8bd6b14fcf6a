"""What a rank has of the model: the tensors of its subnet, and the state that moves with them."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Collectives
from .exchange import assign, average, merge, scatter
from .optimizer_state import OptimizerState
from .partition.cut_dim import CutDim
from .partition.partition import Partition
from .partition.tensor_cut import TensorCut
from .placement import Placement
from .shards import ModelShards
from .subnet import tensors_of


@dataclass(eq=False)
class SubnetParts:
    """The tensors of a subnet: cut ones are this rank's part, shared ones are averaged at a merge.

    ``units`` are those of all ranks in this round, by the name of the cut dimension.
    """

    subnet: nn.Module
    partition: Partition
    cut_dims: Sequence[CutDim]
    cuts: Mapping[str, TensorCut]
    shards: ModelShards
    placement: Placement
    optimizer_state: OptimizerState
    collectives: Collectives
    units: Mapping[str, Sequence[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.draw(0)
        scatter(self.shards.cut_tensors(self.tensors), self._assignments, self.collectives)

    def draw(self, round_index: int) -> None:
        """Draw the units of a round; nothing is sent."""
        self.units = self.partition.draw(self.cut_dims, round_index, self.collectives.size)
        self._assignments = assign(self.cuts, self.units, self.placement, self.collectives)

    def merge(self, optimizer: Optimizer, first_state: Any, round_index: int) -> None:
        """Merge all subnets, and begin round ``round_index`` with other units."""
        parts, states = self.tensors, self.carried_state(optimizer)
        tensors = [*self.shards.cut_tensors(parts), *self.shards.state_tensors(states)]
        merge(tensors, self._assignments, self.collectives, self.partition.copies)
        shared = self.shared
        shared += [s for name in parts if name not in self.cuts for s in states[name].values()]
        for tensor, mean in zip(shared, average(shared, self.collectives), strict=True):
            tensor.data.copy_(mean)
        self.draw(round_index)
        scatter(tensors, self._assignments, self.collectives)
        self.optimizer_state.on_new_round(optimizer, first_state)

    @torch.no_grad()
    def gather_into(self, module: nn.Module) -> None:
        """Write the full model, with the steps since the last merge, into a module."""
        parts, targets = self.tensors, tensors_of(module)
        cut, copies = self.shards.cut_tensors(parts), self.partition.copies
        merge(cut, self._assignments, self.collectives, copies)
        self.shards.gather_into({name: tensor.data for name, tensor in targets.items()})
        means = average(self.shared, self.collectives)
        averaged = dict(zip(self.shared_names, means, strict=True))
        for name, target in targets.items():
            if name not in self.cuts:
                target.data.copy_(averaged.get(name, parts[name]))
        mine = dict(self.subnet.named_buffers())
        for name, buffer in module.named_buffers():
            if name not in targets:
                buffer.copy_(mine[name])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The subnet's tensors by name."""
        return tensors_of(self.subnet)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all subnets' cut tensors."""
        size, tensors = self.collectives.size, self.tensors
        subnets = [self.partition.subnet_of(rank, size) for rank in range(size)]
        return sum(
            torch.Size(cut.part_shape(*subnet)).numel() * tensors[name].element_size()
            for name, cut in self.cuts.items()
            for subnet in subnets
        )

    @property
    def shared_names(self) -> list[str]:
        """The names that ranks average; frozen parameters are equal on all ranks."""
        return [
            name
            for name, tensor in self.tensors.items()
            if name not in self.cuts
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        ]

    @property
    def shared(self) -> list[Tensor]:
        """The tensors that ranks average."""
        tensors = self.tensors
        return [tensors[name].detach() for name in self.shared_names]

    def carried_state(self, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
        """Return the state of an optimizer that moves with each tensor."""
        found = self.optimizer_state.carried_state(optimizer, dict(self.subnet.named_parameters()))
        return {name: found.get(name, {}) for name in self.tensors}

    def describe_shared(self) -> list[tuple[str, str]]:
        """Return what this rank does with each tensor that is not cut, as config fields."""
        averaged = set(self.shared_names)
        return [
            (
                f"requires_grad, dtype and shape of {name}",
                f"{name in averaged}, {tensor.dtype}, {list(tensor.shape)}",
            )
            for name, tensor in self.tensors.items()
            if name not in self.cuts
        ]

    def hash_state(self, optimizer: Optimizer) -> tuple[int, ValueError | None]:
        """Return a number equal on ranks with the same kinds of optimizer state, or an error."""
        try:
            kinds = [
                f"{name} {key} {value.dtype}"
                for name, states in self.carried_state(optimizer).items()
                for key, value in states.items()
            ]
        except ValueError as error:  # raised after an all-gather, so that no rank hangs in it
            return -1, error
        return zlib.crc32("/".join(kinds).encode()), None
