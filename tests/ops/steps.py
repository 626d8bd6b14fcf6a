"""Sample inputs and tests shared by the optimizer steps."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pyparallel.ops import mix_
from tests.cases import pairwise
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    Implementation,
    assert_parity,
    assert_refused,
    double,
    each_compiled,
    each_implementation,
)

FLOAT, BFLOAT16 = torch.float32, torch.bfloat16


def spans_at(fractions: list[float]) -> Callable[[int], list[tuple[int, int]]]:
    """Return what turns a length into spans of it, between every other two of the fractions."""

    def spans(numel: int) -> list[tuple[int, int]]:
        bounds = [round(fraction * numel) for fraction in sorted(fractions)]
        return list(zip(bounds[::2], bounds[1::2], strict=False))

    return spans


SPANS = st.lists(st.floats(0, 1), max_size=12).map(spans_at)  # of hypothesis


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
    masses = torch.rand(num_messages, generator=generator, dtype=torch.float64)
    if num_messages == 3:
        masses[1], messages[1][:] = 0, float("nan")
    prediction, message = (
        None if dtype is None else torch.full((numel,), float("nan"), dtype=dtype)
        for dtype in out_dtypes
    )
    return {
        "mass": double(mass),
        "messages": messages,
        "masses": masses,
        "mix_after": mix_after,
        "grad_scale": None if grad_scale is None else torch.tensor(grad_scale),
        "found_inf": None if found_inf is None else torch.tensor(found_inf),
        "nonfinite": double(5.0) if counts else None,
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


class StepTests:
    """Tests of every optimizer step; a subclass names the op.

    Attributes:
        op, reference: the public function, and its reference.
        buffers: returns its buffers of a length, by name: the first arguments of ``sample``.
        sample: returns all its arguments, by name, in order.
        options: hyperparameters of a plain step.
        more_options: those of others that equal the separate ops.
        predict: the separate prediction from buffers, over 3 steps of these options.
    """

    op: Callable[..., None]
    reference: Callable[..., None]
    buffers: Callable[..., dict[str, Tensor]]
    sample: Callable[..., dict[str, Any]]
    options: dict[str, float]
    more_options: Sequence[dict[str, float]] = ()
    predict: Callable[..., Tensor]

    def parity(
        self, implementation: Implementation, arguments: dict[str, Any], **tolerance: float
    ) -> None:
        if arguments["nonfinite"] is not None:  # the reference and the kernel leave the same out
            for grad in arguments["grad"]:
                grad[::5], grad[3::7], grad[64:80] = float("nan"), float("-inf"), float("inf")
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
        for after in (False, True):
            around = {"num_messages": implementation.num_messages, "mix_after": after}
            arguments = self.sample(1025, **around, out_dtypes=(FLOAT, FLOAT), counts=True)
            self.parity(implementation, arguments, rtol=1e-5, atol=1e-5)

    @each_implementation
    def test_gradients_in_spans(self, implementation):
        # Within a block and across several, adjacent and apart, of length 0, none at all.
        bounds = (3, 3), (3, 20), (20, 511), (512, 513), (600, 1200), (1200, 1208), (2999, 3003)
        whole = ((0, 3003),)
        rows = implementation.cases([(), bounds[::2], bounds, whole], DTYPES, [0, 2], [0, 1])
        for spans, dtype, count, after in rows:
            around = {"num_messages": count, "mix_after": bool(after), "counts": True}
            dtypes = dtype, DTYPES[count - 1], FLOAT
            self.parity(implementation, self.sample(3003, dtypes=dtypes, spans=spans, **around))

    @each_compiled
    def test_many_gradients_go_in_groups(self, implementation):
        # More than fit in one launch on GPUs, and several blocks of elements in a launch.
        rows = zip((7, 64, 40), ((1, 7, 2), (64, 13), (8,)), DTYPES, strict=True)
        for step, lengths, dtype in rows:
            begins = range(0, 9000, step)
            spans = [(begin, begin + lengths[i % len(lengths)]) for i, begin in enumerate(begins)]
            dtypes = FLOAT, dtype, FLOAT
            self.parity(implementation, self.sample(9100, dtypes=dtypes, spans=spans))

    @each_implementation
    def test_mixing_after_the_step(self, implementation):
        rows = implementation.cases(DTYPES, [*DTYPES, None], [*DTYPES, None], [0, 1, 3])
        for dtype, message, prediction, count in rows:
            around = {"num_messages": count, "mix_after": True, "counts": True}
            around["out_dtypes"] = prediction, message
            self.parity(implementation, self.sample(1003, dtypes=(dtype, FLOAT, FLOAT), **around))

    @each_implementation
    def test_scalars_of_gradient_scaling(self, implementation):
        infinity = float("inf")
        rows = implementation.cases([None, 1024.0, 3.7], [1.0, None, 0.0, infinity], [0, 1], [0, 1])
        for scale, found, maximize, after in rows:
            around = {"grad_scale": scale, "found_inf": found, "mix_after": bool(after)}
            arguments = self.sample(1003, maximize=bool(maximize), counts=True, **around)
            arguments["grad"][0][9] = 3e38  # finite before it is unscaled
            arguments["grad"][0][11] = infinity
            arguments["param"][[6, 1002]] = float("nan")
            self.parity(implementation, arguments)

    def test_a_list_of_gradients_steps_its_elements_alone(self):
        own = self.buffers(5003)
        spans = [(0, 64), (64, 1001), (1500, 1500), (2000, 4097)]
        expected = {name: tensor.clone() for name, tensor in own.items()}
        for begin, end in spans:
            self.op(
                **{name: tensor[begin:end] for name, tensor in expected.items()}, **self.options
            )
        self.op(**own | in_spans(own["grad"], spans), **self.options)
        assert all(torch.equal(own[name], expected[name]) for name in own)

    def test_a_gradient_of_any_shape_is_taken_in_order(self):
        own = self.buffers(1000)
        plain = {name: tensor.clone() for name, tensor in own.items()}
        self.op(**plain, **self.options)
        parts = [own["grad"][:600].view(3, 4, 50), own["grad"][600:601].view(()), own["grad"][601:]]
        self.op(**own | {"grad": parts, "offsets": [0, 600, 601]}, **self.options)
        assert all(torch.equal(own[name], plain[name]) for name in own)

    def test_found_inf_leaves_parameters_and_states(self):
        own, around = self.buffers(1000), surroundings(1000, found_inf=1.0, num_messages=0)
        before = {name: tensor.clone() for name, tensor in own.items()}
        self.op(**own, **self.options, **around)
        assert all(torch.equal(own[name], before[name]) for name in own)
        assert torch.equal(around["message"], own["param"].bfloat16())

    def test_elements_with_a_gradient_that_is_not_finite_are_left_out_and_counted(self):
        rows = pairwise(DTYPES, (0, 1), (False, True), (None, 2.0))
        for dtype, num_messages, after, scale in rows:
            scaling = {"grad_scale": scale, "num_messages": num_messages, "mix_after": after}
            own, around = self.buffers(5003, dtypes=(dtype, FLOAT, FLOAT)), []
            own["param"][4000:] = float("inf")  # not a gradient: not counted
            bad = torch.arange(5003) % 3 == 1
            own["grad"][bad] = torch.tensor([float("nan"), float("inf")])[
                torch.arange(bad.sum()) % 2
            ]
            results = []
            spans = [(i, i + 1) for i in range(3000) if not bad[i]]
            for taken, counts in (([(0, 3000)], True), (spans, False)):
                mine = {name: tensor.clone() for name, tensor in own.items()}
                around = surroundings(5003, counts=counts, **scaling)
                self.op(**mine | in_spans(mine.pop("grad"), taken), **self.options, **around)
                results.append((mine, around))
            (left_out, around), (without, expected) = results
            assert around.pop("nonfinite") == 5 + bad[:3000].sum(), f"{dtype}, {scaling}"
            expected.pop("nonfinite")
            close = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
            torch.testing.assert_close(left_out, without, **close)
            torch.testing.assert_close(around, expected, **close)

    def test_nothing_is_counted_with_found_inf_and_all_is_stepped_without_a_counter(self):
        own = self.buffers(1000)
        own["grad"][7] = float("nan")
        counter = double(0.0)
        self.op(**own, **self.options, nonfinite=counter, found_inf=torch.tensor(1.0))
        assert counter == 0
        assert own["param"].isfinite().all()
        self.op(**own, **self.options)
        assert own["param"].isnan().nonzero().flatten().tolist() == [7]

    def test_grad_scale_divides_the_gradient(self):
        for scale, rtol in ((1024.0, 0.0), (3.7, 1e-5)):
            own, plain = self.buffers(1000), self.buffers(1000)
            before = own["grad"].mul_(scale).clone()
            plain["grad"] = own["grad"] / scale
            self.op(**plain, **self.options)
            self.op(**own, **self.options, grad_scale=torch.tensor(scale))
            assert torch.equal(own.pop("grad"), before)
            plain.pop("grad")
            torch.testing.assert_close(own, plain, rtol=rtol, atol=rtol / 10)

    def test_equals_the_separate_ops_bit_for_bit(self):
        every_option = self.options, *self.more_options
        for options, state, num_messages in product(every_option, DTYPES, (0, 1, 2)):
            case = f"{options}, {num_messages} messages, states of {state}"
            own = self.buffers(5003, dtypes=(FLOAT, BFLOAT16, state))
            around = surroundings(5003, num_messages=num_messages)
            apart = {name: tensor.clone() for name, tensor in own.items()}
            apart["param"], mass = mixed(own["param"], around)
            self.op(**apart, **options, mass=mass)
            predicted = self.predict(apart, options | {"lr": options["lr"] / mass})
            self.op(**own, **options, **around)
            assert torch.equal(around["mass"], mass), case
            assert all(torch.equal(own[name], apart[name]) for name in own), case
            assert torch.equal(around["prediction"], predicted), case
            assert torch.equal(around["message"], own["param"].bfloat16()), case

    def test_outputs_are_computed_from_the_rounded_buffers(self):
        for dtype in DTYPES:
            own = self.buffers(1000, dtypes=(dtype,) * 3)
            around = surroundings(1000, out_dtypes=(FLOAT, FLOAT), num_messages=0, mass=1.0)
            self.op(**own, **self.options, **around)
            predicted = self.predict(own, self.options, out=torch.empty(1000))
            assert torch.equal(around["prediction"], predicted), f"{dtype}"
            assert torch.equal(around["message"], own["param"].float()), f"{dtype}"

    def test_mixing_after_the_step_is_two_passes(self):
        for num_messages in (0, 1, 2):
            own, around = self.buffers(5003), surroundings(5003, num_messages=num_messages)
            apart = {name: tensor.clone() for name, tensor in own.items()}
            self.op(**apart, **self.options, mass=around["mass"].clone())
            message = apart["param"].bfloat16()
            apart["param"], mass = mixed(apart["param"], around)
            self.op(**own, **self.options, **around | {"mix_after": True})
            assert torch.equal(around["mass"], mass), num_messages
            assert all(torch.equal(own[name], apart[name]) for name in own), num_messages
            assert torch.equal(around["message"], message), num_messages
            # Nothing to step: the prediction is of the mixed parameters, with their mass.
            ahead = torch.empty(5003)
            rest = {"grad": [], "offsets": [], "mass": mass, "horizon": 3.0, "prediction": ahead}
            self.op(**apart | rest, **self.options)
            assert torch.equal(around["prediction"], ahead), num_messages

    def test_large_outputs_use_non_temporal_stores(self):
        # Above the size for non-temporal stores. The message is shifted: it is not aligned.
        numel = 2**22 + 13
        arguments = self.sample(numel, num_messages=0, out_dtypes=(None, None))
        for aligned, unaligned in zip(DTYPES, (*DTYPES[1:], DTYPES[0]), strict=True):
            arguments["prediction"] = torch.zeros(numel, dtype=aligned)
            arguments["message"] = torch.zeros(numel + 1, dtype=unaligned)[1:]
            self.parity(COMPILED_CPU, arguments)

    def test_gradients_out_of_place_are_refused(self):
        def parts(*lengths):
            return [torch.zeros(length) for length in lengths]

        huge = 2**63 - 1
        rows = [
            ({"grad": parts(50, 50), "offsets": [0]}, "offsets must have an entry for .* 2 gr.* 1"),
            ({"grad": [], "offsets": [0]}, "offsets must have an entry for .* 0 gradients, got 1"),
            ({"grad": parts(50, 50), "offsets": [50, 0]}, r"offsets\[1\] must be from 100, .* 0$"),
            ({"grad": parts(50, 50), "offsets": [0, 49]}, r"offsets\[1\] must be from 50, .* 49$"),
            (
                {"grad": parts(50, 50), "offsets": [0, 51]},
                r"offsets\[1\] .* to 50, .*param, got 51",
            ),
            ({"grad": parts(50), "offsets": [-1]}, r"offsets\[0\] must be from 0, .* got -1"),
            ({"grad": parts(50), "offsets": [huge]}, r"offsets\[0\] must be .* got 9223372036854"),
            ({"grad": parts(101), "offsets": [0]}, r"offsets\[0\] must be from 0, .* to -1, "),
            ({"grad": parts(0), "offsets": [101]}, r"offsets\[0\] .* to 100, .* got 101"),
            ({"grad": [torch.zeros(5, 5).t()[:, 1:]]}, r"grad\[0\] must be .* not contiguous"),
            (
                {"grad": [torch.zeros(5), torch.zeros(5).half()], "offsets": [0, 5]},
                "grad must have one dtype, got float32 and float16",
            ),
            (
                {"grad": [torch.zeros(4).long()]},
                r"grad\[0\] must be .* or float16 on cpu, got int64",
            ),
        ]
        assert_refused(self.op, lambda: self.sample(100), rows, dict.values)
        rows = [
            ({"grad": torch.zeros(99), "offsets": None}, "grad must be .* param's length"),
            ({"grad": torch.zeros(100)}, r"offsets must be None with one gradient, got \[0\]"),
            ({"offsets": None}, "offsets must have an entry for each of 1 gradients, got None"),
        ]
        assert_refused(self.op, lambda: self.sample(100), rows)

    def test_buffers_messages_and_outputs_that_do_not_fit_are_refused(self):
        buffer, one = torch.zeros(200), torch.ones(1).double()
        mixed = {"messages": [torch.zeros(100), torch.zeros(100).half()]}
        rows = [
            ({"param": torch.zeros(10, 10)}, r"param must be a contiguous 1-d .* \[10, 10\]"),
            ({"messages": [torch.zeros(99)]}, r"messages\[0\] must be .* param's length"),
            ({"messages": [torch.zeros(100)] * 2}, r"masses must be .* \[2\] on param's device"),
            ({"messages": []}, r"masses must be .* shape \[0\] .* shape \[1\]"),
            (
                mixed | {"masses": torch.ones(2).double()},
                "messages must have one dtype, got float32 and float16",
            ),
            ({"mass": torch.tensor(1.0)}, "mass must be a 0-d float64 tensor on param's device"),
            ({"mass": one}, "mass must be a 0-d float64 tensor on param's device"),
            ({"masses": torch.ones(1)}, "masses must be a contiguous float64"),
            ({"prediction": torch.zeros(99)}, "prediction must be .* param's length"),
            ({"message": torch.zeros(100).long()}, "message must be .* or float16"),
            ({"message": buffer[::2]}, "message must be .* not contiguous"),
            (
                {"param": buffer[:100], "prediction": buffer[99:199]},
                "prediction must not overlap param",
            ),
            (
                {"grad": [buffer[:100]], "message": buffer[:100]},
                r"message must not overlap grad\[0\], got 400",
            ),
            (
                {"messages": [buffer[:100]], "message": buffer[:100]},
                r"message must not overlap messages\[0\]",
            ),
            (
                {"prediction": buffer[:100], "message": buffer[:100]},
                "message must not overlap prediction",
            ),
            ({"lr": one}, r"lr must be a number, or a 0-d .* shape \[1\]"),
            ({"horizon": one}, "horizon must be a number, or a 0-d"),
        ]
        assert_refused(self.op, lambda: self.sample(100), rows, dict.values)

    def test_numbers_out_of_range_are_refused(self):
        rows = [
            ({"lr": -1e-3}, "lr must be at least 0, got -0.001"),
            ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
            ({"horizon": -1}, "horizon must be at least 0, got -1"),
            ({"prediction": None, "horizon": 2}, "horizon must be 0 where no prediction .*, got 2"),
            ({"masses": None}, "masses must be given with 1 messages, got None"),
        ]
        numbers = [double(number) for number in (0.0, -0.5, float("nan"), float("inf"))]
        impossible = [{"mass": double(0.0), "masses": number.reshape(1)} for number in numbers]
        impossible += [{"mass": each, "messages": [], "masses": None} for each in numbers]
        error_text = "mass and masses must be at least 0 with a positive"
        rows += [(changes, error_text) for changes in impossible]
        assert_refused(self.op, lambda: self.sample(100), rows)

    def test_scalars_of_another_kind_are_refused(self):
        one = torch.tensor(1.0)
        rows = [
            ({"grad_scale": one.double()}, "grad_scale must be a 0-d float32 .* got float64"),
            ({"grad_scale": one.reshape(1)}, r"grad_scale must be .* shape \[1\]"),
            ({"found_inf": one.long()}, "found_inf must be a 0-d float32 tensor on cpu, got int64"),
            ({"found_inf": torch.ones(2)}, r"found_inf must be .* got float32 of shape \[2\]"),
            ({"nonfinite": one}, "nonfinite must be a 0-d float64 tensor on cpu, got float32"),
            ({"nonfinite": one.double().reshape(1)}, r"nonfinite must be .* shape \[1\]"),
        ]
        assert_refused(self.op, lambda: self.sample(100), rows, dict.values)

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
