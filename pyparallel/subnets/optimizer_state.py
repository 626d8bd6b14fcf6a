"""What becomes of an optimizer's state when units move to another subnet."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class OptimizerState(Protocol):
    """The policy: an immutable object whose ``repr`` says all of it."""

    def travelling(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Tensor]]:
        """By parameter and key, the state that travels with it, entry for entry.

        Raises:
            ValueError: state that can neither travel nor stay.
        """

    def renew(self, optimizer: Optimizer, first: Mapping[Any, Any]) -> None:
        """Called when the subnets have been merged and drawn anew.

        Args:
            optimizer: its state is to be made ready.
            first: the "state" of its ``state_dict()`` before the first step.
        """


@dataclass(frozen=True)
class CarryState:
    """State goes where its weights go: a unit keeps its momentum.

    Floating-point tensors of their parameter's shape travel, and are averaged for parameters that
    all subnets share. Scalars such as Adam's ``step`` stay: they count the steps of the rank. An
    entry that no subnet has had yet begins with what the state was before the first step, or with
    zero where a step makes the state.
    """

    def travelling(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Tensor]]:
        """As `OptimizerState.travelling`."""
        return {
            name: {
                key: value
                for key, value in sorted(optimizer.state.get(parameter, {}).items())
                if _travels(name, key, value, parameter)
            }
            for name, parameter in parameters.items()
        }

    def renew(self, optimizer: Optimizer, first: Mapping[Any, Any]) -> None:
        """Nothing."""


@dataclass(frozen=True)
class ResetState:
    """Nothing is kept: every subnet begins with an optimizer that has taken no step.

    So it is in the paper, which trains with plain SGD.
    """

    def travelling(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Tensor]]:
        """Nothing."""
        return {name: {} for name in parameters}

    def renew(self, optimizer: Optimizer, first: Mapping[Any, Any]) -> None:
        """Let the state be the first again: for most optimizers none."""
        optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(first)})


def _travels(name: str, key: str, value: object, parameter: nn.Parameter) -> bool:
    if isinstance(value, Tensor):
        if key == "step":  # the shape of a parameter without dimensions, and no part of it
            return False
        if value.shape == parameter.shape and value.is_floating_point():
            return True
        if value.numel() == 1:
            return False
        found = f"{value.dtype} {list(value.shape)}"
    elif isinstance(value, list | tuple | dict):
        found = f"a {type(value).__name__}"
    else:
        return False
    raise ValueError(
        "optimizer state must be floating-point and of its parameter's shape to travel with it, "
        f"got {key} of {name}: {found} for {list(parameter.shape)}; use ResetState() or another "
        "optimizer"
    )
