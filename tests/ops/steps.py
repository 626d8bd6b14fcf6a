"""Sample inputs and tests shared by the optimizer steps."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.ops import mix_
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    Implementation,
    assert_parity,
    double,
    each_implementation,
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
    mix_after: bool = False,
    grad_scale: float | None = None,
    found_inf: float | None = None,
    counts: bool = False,
) -> dict[str, Any]:
    """Return the messages mixed in, the scalars of AMP, and prediction and message (or None)."""
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
        "mix_after": mix_after,
        "grad_scale": None if grad_scale is None else torch.tensor(grad_scale),
        "found_inf": None if found_inf is None else torch.tensor(found_inf),
        "nonfinite": torch.tensor(5) if counts else None,
        "horizon": double(horizon),
        "prediction": prediction,
        "message": message,
    }


def in_spans(grad: Tensor, spans: Sequence[tuple[int, int]] | None) -> dict[str, Any]:
    """Return a gradient, or these spans of it, as the ops take it."""
    spans = [(0, grad.numel())] if spans is None else spans
    return {
        "grad": [grad[begin:end].clone() for begin, end in spans],
        "offsets": [begin for begin, _ in spans],
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

    @each_implementation
    def test_lengths(self, implementation):
        for numel in implementation.lengths:
            self.parity(implementation, self.sample(numel))

    @each_implementation
    def test_dtypes(self, implementation):
        for dtypes in implementation.cases(DTYPES, DTYPES, DTYPES):  # parameters, gradient, state
            self.parity(implementation, self.sample(1003, dtypes=dtypes))

    @each_implementation
    def test_inputs_and_outputs(self, implementation):
        for out, message, count in implementation.cases([*DTYPES, None], DTYPES, [0, 3]):
            around = {"num_messages": count, "message_dtype": message}
            for out_dtypes in ((out, message), (message, out)):
                self.parity(implementation, self.sample(1003, **around, out_dtypes=out_dtypes))

    @each_implementation
    def test_unaligned_buffers(self, implementation):
        arguments = self.sample(4097)
        for name in ({*self.buffers(0)} - {"grad"}) | {"prediction", "message"}:
            arguments[name] = arguments[name][1:]
        for name in ("grad", "messages"):
            arguments[name] = [arguments[name][0][1:]]
        self.parity(implementation, arguments)

    @each_implementation
    def test_many_messages_go_in_groups(self, implementation):
        # More than one launch on GPUs: grouping changes the last bits.
        arguments = self.sample(1025, num_messages=150, out_dtypes=(FLOAT, FLOAT))
        self.parity(implementation, arguments, rtol=1e-5, atol=1e-5)

    def test_large_outputs_use_non_temporal_stores(self):
        # Above the size for non-temporal stores. The message is shifted: it is not aligned.
        numel = 2**22 + 13
        arguments = self.sample(numel, num_messages=0, out_dtypes=(None, None))
        for aligned, unaligned in zip(DTYPES, (*DTYPES[1:], DTYPES[0]), strict=True):
            arguments["prediction"] = torch.zeros(numel, dtype=aligned)
            arguments["message"] = torch.zeros(numel + 1, dtype=unaligned)[1:]
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
