"""The reference against values computed by hand, and against a plain training loop."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pyparallel.pipeline import (
    GPipe,
    Kind,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipeMare,
    PipeOptim,
    SpecTrain,
    XPipe,
)
from tests.pipeline.every_schedule import EVERY_SCHEDULE, STREAMING, run
from tests.pipeline.models import WIDTH, Conv, Matmul, build_calls, build_layers
from tests.pipeline.reference import (
    Correction,
    Read,
    Version,
    make_stage,
    microbatches_per_update,
    predict,
    reads,
    train_in_one_process,
    train_plainly,
)


def rows_of_stages(schedule, microbatch, microbatches=1):
    return [reads(schedule, microbatch, stage, 4, microbatches) for stage in range(4)]


def test_mini_batch_5_of_the_papers_figure():
    assert rows_of_stages(PipeOptim("live"), 5) == [
        (Read(2, 3), Read(5)),
        (Read(3, 2), Read(5)),
        (Read(4, 1), Read(5)),
        (Read(5), Read(5)),
    ]


def test_spectrain_predicts_half_a_stage_index_further():
    horizons = [(f.horizon, b.horizon) for f, b in rows_of_stages(SpecTrain(variant=1), 9)]
    assert horizons == [(3, 0), (2, 0), (2, 1), (1, 1)]


def test_the_rules_match_the_simulator(subtests):
    for schedule in EVERY_SCHEDULE:
        for microbatches in [3, 4, 7]:
            with subtests.test(schedule=schedule, microbatches=microbatches):
                done = run(schedule, PipelineShape(4, microbatches, 4), steps=4)
                read = np.stack([done.weights.version, done.weights.horizon], axis=1).tolist()
                which = {
                    Kind.FORWARD: 0,
                    Kind.BACKWARD: 1,
                    Kind.BACKWARD_INPUT: 1,
                    Kind.BACKWARD_WEIGHT: 1,
                }
                for (stage, kind, microbatch), found in zip(
                    done.table.rows.tolist(), read, strict=True
                ):
                    if kind in which:
                        rules = reads(schedule, microbatch, stage, 4, microbatches)
                        assert tuple(found) == rules[which[kind]]


class Scale(nn.Module):
    """The product of the input and all factors, one after the other."""

    def __init__(self, *factors):
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.tensor(each)) for each in factors])

    def forward(self, value):
        for factor in self.factors:
            value = value * factor
        return value


def scalars(schedule, calls, microbatches):
    """Train x a b c, with a, b on stage 0, by SGD with lr 1 at x = 1; return a, b, c and losses."""
    ones = torch.ones(microbatches, 1, dtype=torch.float64), torch.ones(microbatches, 1)
    done = train_in_one_process(
        lambda: [Scale(1.0, 2.0), Scale(1.0)],
        [1],
        lambda output, target: (output * target).mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        schedule,
        [[ones] * calls],
        microbatches,
    )
    return [float(weight) for weight in done.state.values()], done.losses


UPDATES_BY_HAND = [
    # Microbatch 0: h = 2, dc = 2, dh = 1, db = 1, da = 2: (a, b, c) = (-1, 1, -1). Then stage 0
    # forwards its first weights again: h = 2, dh = c = -1, db = dh a, da = dh b, and then
    # (-1, 1): h = -1, dh = -3, with b as it is in the backward or as it was.
    (PipeMare(), 1, [6, -1, -2], [2, -2, 3]),
    (PipeDream(), 1, [4, -1, -2], [2, -2, 3]),
    # An average of the last change alone recomputes the weights of the forward.
    (PipeMare(decay=1e-300), 1, [4, -1, -2], [2, -2, 3]),
    # Delay 1: the rate is whole whatever the annealing.
    (PipeMare(annealing=9), 1, [6, -1, -2], [2, -2, 3]),
    # The third forward is predicted by the first gradient, (2, 1): a = -3, b = 0, so h = 0.
    (PipeOptim("live"), 1, [6, -7, -3], [2, -2, 0]),
    (PipeOptim("consistent"), 1, [1, -7, -3], [2, -2, 0]),
    (SpecTrain(variant=1), 1, [6, -7, -3], [2, -2, 0]),
    (SpecTrain(variant=2), 1, [1, -7, -3], [2, -2, 0]),
    # The first gradient twice, on both stages; then that at (-1, 1, -1), which is (-1, 1, -1).
    (PipeDream2BW(), 2, [-2, -1, -2], [2, 2, 1]),
    (PipeDream2BW(), 4, [-2, -1, -2], [2, 2, 1]),
    # As PipeOptim: the microbatches of a step are equal.
    (XPipe("live"), 2, [6, -7, -3], [2, -2, 0]),
    (XPipe("consistent"), 2, [1, -7, -3], [2, -2, 0]),
    # h = 2, then -1, so that dc = -1, dh = -1, db = 1, da = -1; with nothing pending.
    (GPipe(), 2, [0, 0, 0], [2, 1, 0]),
]


def test_three_updates_by_hand(subtests):
    for schedule, microbatches, weights, losses in UPDATES_BY_HAND:
        with subtests.test(schedule=schedule):
            assert scalars(schedule, 3, microbatches) == (weights, losses)


def linear_by_hand(layer, weights, inputs, gradient):
    return gradient @ weights["weight"], {"weight": gradient.T @ inputs, "bias": gradient.sum(0)}


def matmul_by_hand(layer, weights, inputs, gradient):
    return gradient @ weights["weight"].T, {"weight": inputs.T @ gradient}


def conv_by_hand(layer, weights, inputs, gradient):
    kernel = weights["conv.weight"].flatten()
    around = functional.pad(gradient, (1, 1))
    back = sum(kernel[2 - k] * around[:, k : k + WIDTH] for k in range(3))
    shifted = functional.pad(inputs, (1, 1))
    of_kernel = torch.stack([(shifted[:, k : k + WIDTH] * gradient).sum() for k in range(3)])
    bias = gradient.sum().reshape(1)
    return back, {"conv.weight": of_kernel.reshape(1, 1, 3), "conv.bias": bias}


def layer_norm_by_hand(layer, weights, inputs, gradient):
    deviation = (inputs.var(1, unbiased=False, keepdim=True) + layer.eps).sqrt()
    normal = (inputs - inputs.mean(1, keepdim=True)) / deviation
    scaled = gradient * weights["weight"]
    along = (scaled * normal).mean(1, keepdim=True)
    back = (scaled - scaled.mean(1, keepdim=True) - normal * along) / deviation
    return back, {"weight": (gradient * normal).sum(0), "bias": gradient.sum(0)}


BACKWARDS_BY_HAND = [
    (lambda: nn.Linear(WIDTH, WIDTH), linear_by_hand),
    (Matmul, matmul_by_hand),
    (Conv, conv_by_hand),
    (lambda: nn.LayerNorm(WIDTH), layer_norm_by_hand),
]


def test_a_backward_reads_new_weights_and_old_activations(subtests):
    for build, by_hand in BACKWARDS_BY_HAND:
        with subtests.test(by_hand=by_hand):
            torch.manual_seed(3)
            layer = build().double()
            sgd = partial(torch.optim.SGD, lr=0.7)
            stage = make_stage(layer, sgd, predict, Correction(GPipe(), delay=0))
            inputs, gradient = torch.randn(2, 3, WIDTH, dtype=torch.float64)
            done = stage.forward(Read(0), inputs.requires_grad_())
            stage.gradients = {name: torch.randn_like(w) for name, w in done.leaves.items()}
            stage.update()
            stage.backward(done, Read(1), [gradient])
            weights = stage.history[1].weights()
            of_inputs, of_weights = by_hand(layer, weights, inputs.detach(), gradient)
            torch.testing.assert_close(inputs.grad, of_inputs)
            torch.testing.assert_close(stage.gradients, of_weights)
            of_old_weights, _ = by_hand(
                layer, stage.history[0].weights(), inputs.detach(), gradient
            )
            assert not torch.allclose(inputs.grad, of_old_weights, rtol=1e-2)


def step_on(optimizer_fn, gradients):
    parameter = nn.Parameter(torch.tensor(8.0, dtype=torch.float64))
    version = Version({"w": parameter}, [optimizer_fn([parameter])])
    for each in gradients:
        gradient = {"w": torch.tensor(each, dtype=torch.float64)}
        version = version.after(gradient, Correction(GPipe(), delay=0))
    return version


PREDICTIONS_BY_HAND = [
    (lambda p: torch.optim.SGD(p, lr=0.5), [], 8),
    (lambda p: torch.optim.Adam(p, lr=0.5), [], 8),
    (lambda p: torch.optim.SGD(p, lr=0.5), [1.0, 2.0], 6.5 - 3 * 0.5 * 2),
    # Momentum 1, then 0.5 + 2 = 2.5, and 8 - 0.5 - 1.25 = 6.25.
    (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5), [1.0, 2.0], 6.25 - 3 * 0.5 * 2.5),
    # With dampening 0.5 the second is 0.5 + 1 = 1.5.
    (
        lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, dampening=0.5),
        [1.0, 2.0],
        6.75 - 3 * 0.5 * 1.5,
    ),
    # Constant gradients: every step is lr, whatever AdamW's decay before it.
    (lambda p: torch.optim.Adam(p, lr=0.5, eps=0), [4.0, 4.0], 7 - 3 * 0.5),
    (
        lambda p: torch.optim.AdamW(p, lr=0.5, eps=0, weight_decay=0.25),
        [4.0],
        8 * (1 - 0.5 * 0.25) - 0.5 - 3 * 0.5,
    ),
]


def test_predictions_by_hand(subtests):
    for optimizer_fn, gradients, ahead in PREDICTIONS_BY_HAND:
        with subtests.test(ahead=ahead):
            version = step_on(optimizer_fn, gradients)
            before = version.weights()["w"].clone()
            assert float(predict(version, 3)["w"]) == pytest.approx(ahead, rel=1e-15)
            assert torch.equal(version.weights()["w"], before)


def test_pipemares_rates_grow_to_1():
    correction = Correction(PipeMare(annealing=4), delay=16)
    rates = [correction.annealed_rate(count) for count in range(6)]
    assert rates == pytest.approx([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 1])


def train(schedule, split, streams, num_microbatches=4):
    return train_in_one_process(
        build_layers,
        split,
        functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        schedule,
        streams,
        num_microbatches,
    )


def plainly(schedule, streams, num_microbatches=4):
    model = train_plainly(
        build_layers,
        functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        streams,
        num_microbatches,
        update_each=microbatches_per_update(schedule, num_microbatches) == 1,
    )
    return model.state_dict()


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# SpecTrain's first variant predicts half a stage's index ahead even then; PipeMare anneals rates.
SEQUENTIAL = set(STREAMING) - {SpecTrain(variant=1), PipeMare(annealing=10, decay=0.25)}


def test_a_pipeline_flushed_after_every_update_is_plain_training(subtests):
    for schedule in sorted(SEQUENTIAL, key=repr):
        with subtests.test(schedule=schedule):
            streams = [[call] for call in build_calls(3, samples=3)]
            found = train(schedule, [3, 6, 9], streams, num_microbatches=1)
            assert_equal(found.state, plainly(schedule, streams, num_microbatches=1))


def test_training_without_flushes_differs_from_plain_training(subtests):
    for schedule in STREAMING:
        with subtests.test(schedule=schedule):
            streams = [build_calls(3, samples=8)]
            found, expected = train(schedule, [3, 6, 9], streams).state, plainly(schedule, streams)
            assert not torch.allclose(found["0.weight"], expected["0.weight"], rtol=1e-3)
