"""Shared parts of the optimizer steps: mixing of messages before, checks of outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, float64

from ._checks import (
    Number,
    check_apart,
    check_buffer,
    check_doubles,
    check_like,
    check_one_dtype,
    has_memory,
    require,
)
from .mix import check_masses, mix_reference


def mixed(param: Tensor, mass: Tensor, messages: list[Tensor], masses: Tensor) -> Tensor:
    """Return the parameters in fp32 after ``mix_``; the messages' masses are added to ``mass``."""
    z = param.to(torch.float32, copy=True)
    if messages:
        mix_reference(z, mass, messages, masses)
    return z


def check_step(
    param: Tensor,
    others: dict[str, Tensor],
    messages: Sequence[Tensor],
    horizon: Number,
    outputs: dict[str, Tensor | None],
) -> None:
    """Raise on buffers unlike ``param``, and on outputs that overlap another buffer."""
    check_buffer("param", param)
    incoming = {f"messages[{index}]": message for index, message in enumerate(messages)}
    for name, tensor in {**others, **incoming}.items():
        check_like(name, tensor, "param", param)
    check_one_dtype("messages", list(messages))
    require("horizon", "at least 0", horizon, horizon >= 0)
    if outputs["prediction"] is None:
        require("horizon", "0 where no prediction is given", horizon, horizon == 0)
    taken = {"param": param, **others, **incoming}
    for name, output in outputs.items():
        if output is None:
            continue
        check_like(name, output, "param", param)
        for other_name, other in taken.items():
            check_apart(name, output, other_name, other)
        taken[name] = output


def take_masses(
    param: Tensor, mass: Tensor | None, messages: Sequence[Tensor], masses: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the rank's own mass and the messages' masses as the ops take them.

    Args:
        param: (n,) the parameters.
        mass: 0-d float64; None: 1.
        messages: k messages.
        masses: (k,) float64; None: empty, only without messages.
    """
    if masses is None:
        if messages:
            raise ValueError(f"masses must be given with {len(messages)} messages, got None")
        masses = torch.empty(0, dtype=float64)
    if mass is None:
        # Without messages it is only a scalar, which need not be on the device.
        mass = torch.ones((), dtype=float64, device=param.device if messages else None)
    else:
        check_doubles("mass", mass, (), param, "param")
    check_doubles("masses", masses, (len(messages),), param if messages else masses, "param")
    if mass.device.type == "cpu" and has_memory(mass):
        check_masses("mass", mass.item(), masses.tolist())
    return mass, masses
