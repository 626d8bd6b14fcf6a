"""Parameters that several ranks hold: one of them updates, the others follow."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...comm import Collectives, Run
from ..schedules.shape import PipelineShape
from .slice import Tie


class TiedParameters:
    """This rank's tied parameters of which other ranks hold copies; all ranks pass all ties.

    The first stage that holds one owns it: its optimizer updates it, with the sum of all gradients,
    and the copies are equal to the last bit. Stages of one rank share the parameter itself.
    """

    def __init__(self, ties: Sequence[Tie], shape: PipelineShape, rank: int, run: Run) -> None:
        self.are_on_several_ranks = False  # which all ranks know
        self._copies: list[tuple[nn.Parameter, Collectives, int]] = []  # int: the owner's rank
        groups: dict[tuple[int, ...], Collectives] = {}
        for tie in ties:
            ranks = tuple(sorted({stage % shape.num_ranks for stage in tie.stages}))
            if len(ranks) == 1:
                continue
            self.are_on_several_ranks = True
            if rank in ranks:
                if ranks not in groups:
                    groups[ranks] = Collectives(run.within(ranks))
                owner = ranks.index(tie.stages[0] % shape.num_ranks)
                self._copies.append((tie.parameter, groups[ranks], owner))

    @property
    def copies(self) -> list[Tensor]:
        """Return what follows another rank's parameter."""
        return [p.data for p, ranks, owner in self._copies if ranks.rank != owner]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give the sum of all ranks' gradients to the owner; the others' are then None."""
        for parameter, ranks, owner in self._copies:
            if not parameter.requires_grad:
                continue
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = gradient.to(dtype, copy=True).contiguous()
            ranks.all_reduce_(total)
            if ranks.rank != owner:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = total.to(parameter.dtype)
            else:
                parameter.grad.copy_(total)

    def drop_gradients(self) -> None:
        """Drop the gradients of an update that is skipped; the owner's optimizer drops its own."""
        for parameter, ranks, owner in self._copies:
            if ranks.rank != owner:
                parameter.grad = None

    @torch.no_grad()
    def copy_from_owners(self) -> None:
        """Overwrite the copies by their owners' parameters."""
        for parameter, ranks, owner in self._copies:
            ranks.broadcast_(parameter.data, owner)
