"""Corrections of delayed gradients, against the rules applied to torch's optimizers."""

import re
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

from pyparallel.optim import AdamW as FusedAdamW
from pyparallel.pipeline import (
    Displacement,
    LastUpdate,
    Nesterov,
    NoPrediction,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipeMare,
    PipeOptim,
    SpecTrain,
    StageMomentum,
    UpdateErrorFeedback,
    XPipe,
)
from pyparallel.pipeline.prediction.corrections import DelayedOptimizer
from pyparallel.pipeline.prediction.last_update import wrap_corrected
from tests.pipeline.every_schedule import FLUSHING
from tests.pipeline.prediction.predictors import (
    OneStage,
    assert_close,
    assert_equal,
    assert_resumes_bitwise,
    gradients_of,
)

MATRICES = [(7, 5), (3, 8), (4, 4)]
MAKERS = [
    partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    partial(AdamW, lr=0.01, weight_decay=0.5),
    partial(Muon, lr=0.02),
    partial(FusedAdamW, lr=0.01, weight_decay=0.5),
]
COEFFICIENTS = [(UpdateErrorFeedback(), 1.0), (UpdateErrorFeedback(0.5), 0.5),
                (UpdateErrorFeedback(2), 2.0), (UpdateErrorFeedback(None), 3.0)]  # fmt: skip


def build(make, correction, prediction=Displacement(), delay=3, num_stages=4):  # noqa: B008
    stage = OneStage(make, prediction, [{}, {"lr": 0.003}], shapes=MATRICES)
    if isinstance(stage.optimizer, FusedAdamW):
        stage.weights = stage.optimizer.lay_out()
        stage.predictor = prediction.attach(stage.optimizer, stage.weights)
        stage.buffers = [buffer for each in stage.weights for buffer in each.buffers]
    if correction is not None:
        delayed = DelayedOptimizer(stage.optimizer, stage.weights, delay, num_stages)
        stage.predictor = wrap_corrected(correction, stage.predictor, delayed)
    return stage


class ByHand:
    """Error feedback of one parameter's updates; the optimizer's own weights go on beside it."""

    def __init__(self, stage, coefficient):
        self.twin, self.coefficient = stage.twin(), coefficient
        self.last = [None] * len(stage.parameters)

    def step(self, gradients):
        before = [each.detach().clone() for each in self.twin.parameters]
        after = self.twin.step(gradients)
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if gradients[index] is not None:
                update, last = old - new, self.last[index]
                self.last[index] = update
                if last is not None:
                    new.sub_(update - last, alpha=self.coefficient)
        return after


def test_an_update_goes_on_as_it_has_changed(subtests):
    for make in MAKERS:
        for correction, coefficient in COEFFICIENTS:
            with subtests.test(make=make, correction=correction):
                stage = build(make, correction)
                by_hand = ByHand(stage, coefficient)
                for seed in range(4):
                    gradients = gradients_of(stage, seed)
                    if seed in (0, 2):  # its first update comes later; a later one is missing
                        gradients[seed // 2] = None
                    before = stage.values()
                    stage.step(gradients)
                    # Muon in bfloat16 magnifies rounding.
                    loose = {"rtol": 1e-5, "atol": 1e-3 if make.func is Muon else 2e-6}
                    assert_close(stage.values(), by_hand.step(gradients), **loose)
                    for each, old, gradient in zip(
                        stage.parameters, before, gradients, strict=True
                    ):
                        assert gradient is not None or torch.equal(each, old)


def test_a_prediction_is_by_the_optimizers_rule_or_by_the_corrected_update():
    for prediction in (Displacement(), LastUpdate()):
        stage = build(partial(SGD, lr=0.5), UpdateErrorFeedback(), prediction)
        for seed in range(2):
            before, gradients, out = stage.values(), gradients_of(stage, seed), stage.outputs()
            stage.step(gradients, 2, out)
        rates = [0.5] * 3 + [0.003] * 3
        moves = [rate * gradient for rate, gradient in zip(rates, gradients, strict=True)]
        if prediction == LastUpdate():
            moves = [last - now for last, now in zip(before, stage.values(), strict=True)]
        expected = [weight - 2 * move for weight, move in zip(stage.values(), moves, strict=True)]
        assert_close(stage.parts(out), expected, rtol=1e-5, atol=1e-6)
        assert_equal(stage.parts(out), stage.predicted(2))


def test_a_loaded_state_corrects_bitwise_as_the_saved_one(subtests):
    for make in MAKERS:
        with subtests.test(make=make):
            assert_resumes_bitwise(partial(build, make, UpdateErrorFeedback()))


def with_momentum(optimizer, value):
    """Give an optimizer's groups a momentum."""
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = value, group["betas"][1]
        else:
            group["momentum"] = value


MOMENTA = [
    (partial(SGD, lr=0.1, momentum=0.8), 0.8),
    (partial(SGD, lr=0.1, momentum=0.8, nesterov=True), 0.8),
    (partial(RMSprop, lr=0.01, momentum=0.6), 0.6),
    (partial(Adam, lr=0.01, betas=(0.9, 0.99)), 0.9),
    (partial(NAdam, lr=0.01), 0.9),
    (partial(FusedAdamW, lr=0.01), 0.9),
    (partial(Muon, lr=0.02), 0.95),
]


def test_momentum_grows_with_the_delay(subtests):
    for make, momentum in MOMENTA:
        for limit, delay, num_stages in [(0.99, 1, 2), (0.97, 3, 4), (0.95, 1, 8)]:
            with subtests.test(make=make, limit=limit, delay=delay):
                stage = build(make, StageMomentum(limit), delay=delay, num_stages=num_stages)
                plain = OneStage(make, NoPrediction(), [{}, {"lr": 0.003}], shapes=MATRICES)
                own = momentum + delay * (limit - momentum) / num_stages
                with_momentum(plain.optimizer, own)
                groups = [dict(group) for group in stage.optimizer.param_groups]
                for seed in range(3):
                    gradients = gradients_of(stage, seed)
                    stage.step(gradients, 2, stage.outputs())
                    plain.step(gradients)
                    assert_close(stage.values(), plain.values(), rtol=0.0, atol=0.0)
                    now = [dict(group) for group in stage.optimizer.param_groups]
                    assert [g.get("momentum", g.get("betas")) for g in now] == [
                        g.get("momentum", g.get("betas")) for g in groups
                    ]


def test_a_prediction_uses_the_grown_momentum(subtests):
    for make, momentum in MOMENTA:
        with subtests.test(make=make):
            stage, plain = build(make, StageMomentum(0.99)), build(make, None)
            with_momentum(plain.optimizer, momentum + 3 * (0.99 - momentum) / 4)
            for seed in range(3):
                gradients = gradients_of(stage, seed)
                out = stage.outputs()
                stage.step(gradients, 3, out)
                plain.step(gradients)
                assert_equal(stage.parts(out), plain.predicted(3))
                assert_equal(stage.predicted(3), plain.predicted(3))
            if make.func in (Adam, NAdam):  # whose bias correction has the momentum
                with_momentum(plain.optimizer, momentum)
                moved = zip(stage.predicted(3), plain.predicted(3), strict=True)
                assert not any(torch.equal(a, b) for a, b in moved)


def test_the_groups_have_their_own_momentum_after_a_step_that_fails():
    stage = build(partial(SGD, lr=0.1, momentum=0.5), StageMomentum())
    seen = []

    def fail(optimizer, *ignored):
        seen.append(optimizer.param_groups[0]["momentum"])
        raise ArithmeticError("in the middle")

    stage.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="in the middle"):
        stage.step(gradients_of(stage))
    assert seen == [pytest.approx(0.5 + 3 * 0.49 / 4)]
    assert [group["momentum"] for group in stage.optimizer.param_groups] == [0.5, 0.5]


def test_a_scheduler_may_change_the_momentum_between_steps():
    stage = build(partial(SGD, lr=0.1, momentum=0.5), StageMomentum(0.9))
    seen = []
    stage.optimizer.register_step_pre_hook(
        lambda optimizer, *ignored: seen.append(optimizer.param_groups[0]["momentum"])
    )
    stage.step(gradients_of(stage))
    with_momentum(stage.optimizer, 0.7)
    stage.step(gradients_of(stage))
    assert seen == pytest.approx([0.5 + 0.75 * 0.4, 0.7 + 0.75 * 0.2])


BY_ONE_LESS = [PipeDream(), PipeOptim("live"), PipeOptim("consistent"), SpecTrain(1), SpecTrain(2),
               PipeMare(), Nesterov(), Nesterov("live")]  # fmt: skip


def test_the_delay_of_a_stage():
    def delays(schedule, num_stages, num_microbatches):
        shape = PipelineShape(num_stages, num_microbatches, num_stages)
        return [schedule.delay(shape, stage) for stage in range(num_stages)]

    for schedule in BY_ONE_LESS:
        assert delays(schedule, 4, 2) == delays(schedule, 4, 9) == [3, 2, 1, 0], schedule
        assert delays(schedule, 1, 2) == [0]
    for schedule in (XPipe("live"), XPipe("consistent")):
        assert delays(schedule, 5, 4) == [1, 1, 1, 1, 0]
        assert delays(schedule, 5, 3) == [2, 1, 1, 1, 0]
        assert delays(schedule, 5, 1) == [4, 3, 2, 1, 0]
    assert delays(PipeDream2BW(), 5, 4) == [1] * 5
    assert delays(PipeDream2BW(), 5, 3) == [2] * 5
    assert delays(PipeDream2BW(), 1, 3) == [0]
    for schedule in FLUSHING:
        assert delays(schedule, 4, 4) == [0] * 4, schedule


NAN = float("nan")
COEFFICIENT = "coefficient must be a finite number above 0, or None, got {!r}; 1 is the paper's"
BAD = [
    *((UpdateErrorFeedback, each, COEFFICIENT)
      for each in (0, -1, 0.0, NAN, float("inf"), True, "1", [1])),
    *((StageMomentum, each, "limit must be a number in (0, 1), got {!r}")
      for each in (0, 1, 2, -0.5, NAN, True, "0.9", None)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "sentence"), BAD)
def test_a_number_out_of_range_is_refused(kind, value, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence.format(value))}$"):
        kind(value)


class Plain(Optimizer):
    """An optimizer without a momentum."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (partial(SGD, lr=0.1), "0 in SGD"),
        (Plain, "none in Plain"),
        (partial(Adam, betas=(0.0, 0.9)), "0 in Adam"),
        (partial(SGD, lr=0.1, momentum=0.95), "0.95 in SGD"),
    ],
)
def test_a_momentum_must_be_above_0_and_at_most_the_limit(make, got):
    sentence = (
        "optimizer must, for StageMomentum, have a momentum (or betas) above 0 and at most the "
        f"limit 0.9, got {got}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        build(make, StageMomentum(0.9), NoPrediction())
