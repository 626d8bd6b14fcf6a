"""Sample inputs and tests shared by the optimizer steps."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pyparallel.ops import mix_
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    IMPLEMENTATIONS,
    LENGTHS,
    Implementation,
    assert_parity,
    double,
)

FLOAT, BFLOAT16 = torch.float32, torch.bfloat16


def normals(numel: int, scale: float = 1.0) -> Iterator[Tensor]:
    """Return buffers of random numbers, the same for the same length."""
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
    """Return the messages before the step, and prediction and message (or None) after."""
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
    """Return the parameters and the mass after the separate op, on copies."""
    z, mass = param.clone(), around["mass"].clone()
    mix_(z, mass, around["messages"], around["masses"])
    return z, mass


def assert_close_by_roundings(
    actual: Tensor, expected: Tensor, magnitude: Tensor, roundings: float
) -> None:
    """Check that they differ by at most this many roundings of fp32 at that magnitude."""
    allowed = roundings * 2.0**-24 * magnitude.double().abs()
    assert ((actual.double() - expected.double()).abs() <= allowed).all()


class StepTests:
    """Tests of every optimizer step; a subclass names the op.

    Attributes:
        op, reference: the public function, and its reference.
        buffers: returns its buffers of a length, by name: the first arguments of ``sample``.
        sample: returns all its arguments, by name, in order.
        options: hyperparameters of a plain step.
    """

    op: Callable[..., None]
    reference: Callable[..., None]
    buffers: Callable[..., dict[str, Tensor]]
    sample: Callable[..., dict[str, Any]]
    options: dict[str, float]

    def parity(
        self, implementation: Implementation, arguments: dict[str, Any], **tolerance: float
    ) -> None:
        values = tuple(arguments.values())
        assert_parity(implementation, self.op.__name__, self.reference, values, **tolerance)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
    @pytest.mark.parametrize("numel", LENGTHS)
    def test_lengths(self, implementation, numel):
        self.parity(implementation, self.sample(numel))

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
    def test_dtypes(self, implementation, dtype, grad_dtype, state_dtype):
        self.parity(implementation, self.sample(1003, dtypes=(dtype, grad_dtype, state_dtype)))

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
    @pytest.mark.parametrize("message_dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("out_dtype", [*DTYPES, None], ids=str)
    @pytest.mark.parametrize("num_messages", [0, 3])
    def test_inputs_and_outputs(self, implementation, message_dtype, out_dtype, num_messages):
        around = {"num_messages": num_messages, "message_dtype": message_dtype}
        for out_dtypes in ((out_dtype, message_dtype), (message_dtype, out_dtype)):
            self.parity(implementation, self.sample(1003, **around, out_dtypes=out_dtypes))

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
    def test_unaligned_buffers(self, implementation):
        arguments = self.sample(4097)
        for name in (*self.buffers(0), "prediction", "message"):
            arguments[name] = arguments[name][1:]
        arguments["messages"] = [arguments["messages"][0][1:]]
        self.parity(implementation, arguments)

    @pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
    def test_many_messages_go_in_groups(self, implementation):
        # More than one launch on GPUs: grouping changes the last bits.
        arguments = self.sample(1025, num_messages=150, out_dtypes=(FLOAT, FLOAT))
        self.parity(implementation, arguments, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shift", [0, 1])
    def test_large_outputs_use_non_temporal_stores(self, out_dtype, shift):
        # Above the size for non-temporal stores; shifted, the target is not aligned.
        numel = 2**22 + 13
        arguments = self.sample(numel, num_messages=0, out_dtypes=(None, None))
        for name in ("prediction", "message"):
            arguments[name] = torch.zeros(numel + shift, dtype=out_dtype)[shift:]
        self.parity(COMPILED_CPU, arguments)

    def test_mass_one_changes_no_bit(self):
        own = self.buffers(1000)
        plain = {name: tensor.clone() for name, tensor in own.items()}
        self.op(**plain, **self.options)
        self.op(**own, **self.options, mass=double(1.0))
        assert all(torch.equal(own[name], plain[name]) for name in own)

    def test_horizon_zero_gives_the_new_parameters(self):
        own, prediction = self.buffers(1000), torch.empty(1000)
        self.op(**own, **self.options, prediction=prediction)
        assert torch.equal(prediction, own["param"])

    def test_compiles_into_a_graph_without_breaks(self):
        arguments, expected = self.sample(1000), self.sample(1000)
        self.reference(*expected.values())
        torch.compile(self.op, fullgraph=True, backend="aot_eager")(**arguments)
        torch.testing.assert_close(arguments, expected, rtol=0.0, atol=0.0)
