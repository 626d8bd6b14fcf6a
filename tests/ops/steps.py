"""Sample inputs and checks that the optimizer steps share."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyparallel.ops import mix_
from tests.ops.parity import double

FLOAT, BFLOAT16 = torch.float32, torch.bfloat16


def normals(numel: int, scale: float = 1.0) -> Iterator[Tensor]:
    """Buffers of random numbers, the same for the same length."""
    generator = torch.Generator().manual_seed(numel)
    while True:
        yield scale * torch.randn(numel, generator=generator)


def surroundings(
    numel: int,
    *,
    num_messages: int = 1,
    message_dtype: torch.dtype = BFLOAT16,
    out_dtypes: tuple[torch.dtype | None, torch.dtype | None] = (FLOAT, BFLOAT16),
    mass: float = 0.75,
    horizon: float = 3.0,
    scale: float = 1.0,
) -> dict[str, Any]:
    """What goes around the step: messages before it; prediction and message (or None) after."""
    source = normals(numel + 1, scale)
    messages = [next(source)[1:].to(message_dtype) for _ in range(num_messages)]
    generator = torch.Generator().manual_seed(num_messages)
    prediction, message = (
        None if dtype is None else torch.full((numel,), float("nan"), dtype=dtype)
        for dtype in out_dtypes
    )
    return {
        "mass": double(mass),
        "messages": messages,
        "masses": torch.rand(num_messages, generator=generator, dtype=torch.float64),
        "horizon": double(horizon),
        "prediction": prediction,
        "message": message,
    }


def mixed(param: Tensor, around: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The parameters and the mass after the separate op, on copies."""
    z, mass = param.clone(), around["mass"].clone()
    mix_(z, mass, around["messages"], around["masses"])
    return z, mass


def assert_close_by_roundings(
    actual: Tensor, expected: Tensor, magnitude: Tensor, roundings: float
) -> None:
    """They differ by at most this many roundings of fp32 numbers of that magnitude."""
    allowed = roundings * 2.0**-24 * magnitude.double().abs()
    assert ((actual.double() - expected.double()).abs() <= allowed).all()
