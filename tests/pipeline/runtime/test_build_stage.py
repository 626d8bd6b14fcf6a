"""A stage's optimizers: which ones are accepted, and their states."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adadelta, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from pyparallel.optim import AdamW as FusedAdamW
from pyparallel.pipeline import (
    Displacement,
    GPipe,
    Interlocking,
    LastUpdate,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeOptim,
    StageMomentum,
    UpdateErrorFeedback,
)
from pyparallel.planning.pipelines import FromActions
from pyparallel.training import seal
from tests.pipeline.models import as_on_gpus

NUM_MICROBATCHES = 3
WIDTH = 4


def build_layers():
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def batches(number):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 6, WIDTH, generator=generator)) for _ in range(number)]


def muon_and(rest, parameters):
    vectors = [p for p in parameters if p.dim() != 2]
    return [Muon([p for p in parameters if p.dim() == 2], lr=0.02), rest(vectors, lr=0.02)]


def build(schedule, optimizer_fn=partial(muon_and, AdamW), **options):  # noqa: B008
    return PipelineTrainer(
        build_layers(), mse_loss, optimizer_fn, schedule,
        num_microbatches=NUM_MICROBATCHES, split=[2], **options,
    )  # fmt: skip


def train(trainer, calls):
    losses = [trainer.step(*call) for call in calls]
    trainer.flush()
    return losses


def weights_of(trainer):
    return [each.detach().clone() for stage in trainer.stages for each in stage.optimized]


def twice(parameters):
    return [SGD(parameters, lr=0.1), AdamW(parameters[:1], lr=0.1)]


def same_twice(parameters):
    return [SGD(parameters, lr=0.1)] * 2


ONCE = (
    "optimizer_fn must return optimizers that hold each parameter once, got 0.weight "
    "of shape [4, 4] in "
)
RETURN = "optimizer_fn must be a function that returns a torch optimizer or a list of them, got "
LATE_ONLY = "must be None with {}, whose gradients are not delayed, got UpdateErrorFeedback("
AN_OBJECT = "correction must be an object such as UpdateErrorFeedback() or StageMomentum(), or None"
NORM = "max_norm must be a number above 0, or None"
STEPS = "gradient_accumulation_steps must be a positive integer"


def accumulating(steps):
    return {"gradient_accumulation_steps": steps}


MISTAKES = {
    "three parameters": (
        {"optimizer_fn": lambda parameters, names, rate: SGD(parameters, rate)},
        "missing 2 required positional arguments: 'names' and 'rate'"),
    "names taken for a rate": (
        {"optimizer_fn": lambda parameters, lr: SGD(parameters, float(lr))}, "TypeError: float()"),
    "no optimizer": ({"optimizer_fn": lambda parameters: 3}, f"TypeError: {RETURN}3"),
    "a class": ({"optimizer_fn": lambda parameters: SGD}, f"{RETURN}the class SGD"),
    "no optimizer in a list": (
        {"optimizer_fn": lambda parameters: [SGD(parameters, lr=0.1), "SGD"]}, f"{RETURN}'SGD'"),
    "a generator": ({"optimizer_fn": lambda parameters: iter([SGD(parameters)])}, RETURN),
    "an empty list": (
        {"optimizer_fn": lambda parameters: []},
        f"{ONCE}none; freeze it with requires_grad_(False) to train without it"),
    "a parameter in none": (
        {"optimizer_fn": lambda parameters: SGD(parameters[1:], lr=0.1)}, f"{ONCE}none; freeze it"),
    "a parameter twice": ({"optimizer_fn": twice}, f"{ONCE}SGD and AdamW"),
    "an optimizer twice": ({"optimizer_fn": same_twice}, f"{ONCE}SGD and SGD"),
    "Muon of a vector": (
        {"optimizer_fn": partial(Muon, lr=0.1)},
        "Muon only supports 2D parameters whereas we found a parameter with size: torch.Size([4])"),
    "no rule": (
        {"optimizer_fn": lambda parameters: [*muon_and(Adadelta, parameters)]},
        "optimizer must, for a schedule that predicts weights, be of pyparallel.optim, or torch's "
        "SGD, Adam, AdamW, NAdam, RMSprop or Muon, or Lion of lion-pytorch or timm, or have a "
        "method displacement(parameter, state, group, horizon), got "
        "torch.optim.adadelta.Adadelta; add the method, pass an object that has it as "
        "prediction=Displacement(rule), or pass prediction=LastUpdate()"),
    "no momentum": (
        {"optimizer_fn": partial(SGD, lr=0.1), "correction": StageMomentum()},
        "optimizer must, for StageMomentum, have a momentum (or betas) above 0 and at most the "
        "limit 0.99, got 0 in SGD"),
    "a correction with a flush": (
        {"schedule": GPipe(), "correction": UpdateErrorFeedback()},
        f"correction {LATE_ONLY.format('GPipe')}"),
    "a correction with 1F1B": (
        {"schedule": OneForwardOneBackward(), "correction": UpdateErrorFeedback()},
        f"correction {LATE_ONLY.format('OneForwardOneBackward')}"),
    "a correction with heads": (
        {"schedule": Interlocking(2, nn.Linear(WIDTH, WIDTH)), "correction": UpdateErrorFeedback()},
        f"correction {LATE_ONLY.format('Interlocking')}"),
    "a correction with actions": (
        {"schedule": FromActions(GPipe().actions(2, NUM_MICROBATCHES)),
         "correction": UpdateErrorFeedback()},
        f"correction {LATE_ONLY.format('FromActions')}"),
    "a correction's class": (
        {"correction": UpdateErrorFeedback},
        f"{AN_OBJECT}, got the class UpdateErrorFeedback; create an object"),
    "a prediction": ({"correction": Displacement()}, f"{AN_OBJECT}, got Displacement()"),
    "a norm in words": ({"max_norm": "1.0"}, f"{NORM}, got '1.0'"),
    "a norm that is true": ({"max_norm": True}, f"{NORM}, got True"),
    "a norm in a tensor": ({"max_norm": torch.ones(1)}, f"{NORM}, got a tensor of"),
    "a norm of 0": ({"max_norm": 0}, f"{NORM}, got 0"),
    "a negative norm": ({"max_norm": -1.0, "schedule": GPipe()}, f"{NORM}, got -1.0"),
    "a norm of nan": ({"max_norm": float("nan")}, f"{NORM}, got nan"),
    "steps in words": ({**accumulating("2"), "schedule": GPipe()}, f"{STEPS}, got '2'"),
    "half steps": (accumulating(1.5), f"{STEPS}, got 1.5"),
    "true steps": (accumulating(True), f"{STEPS}, got True"),
    "no steps": ({**accumulating(0), "schedule": GPipe()}, f"{STEPS}, got 0"),
    "negative steps": (accumulating(-1), f"{STEPS}, got -1"),
    "steps without a flush": (
        accumulating(2),
        "gradient_accumulation_steps must be 1 with PipeOptim, which does not flush, got 2: take a "
        "schedule that flushes, or PipeDream2BW() with 2 times the microbatches in a step"),
    "a coefficient": ({"correction": 1.0}, f"{AN_OBJECT}, got 1.0"),
}  # fmt: skip


LOCAL = [name for name, (options, _) in MISTAKES.items() if set(options) == {"optimizer_fn"}]


def find_error(options):
    try:
        build(**{"schedule": PipeOptim(), **options})
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def find_errors(rank):
    """Return the errors of mistakes of both ranks, of rank 1 alone, and between the ranks."""
    found = [find_error(options) for options, _ in MISTAKES.values()]
    found += [find_error(MISTAKES[name][0] if rank else {}) for name in LOCAL]
    others = [UpdateErrorFeedback(), UpdateErrorFeedback(0.5)], [StageMomentum(), None]
    found += [find_error({"correction": each[rank]}) for each in others]
    found += [find_error({"max_norm": [1.0, None][rank]})]
    found += [find_error({"schedule": GPipe(), **accumulating(rank + 1)})]
    train(build(PipeOptim()), batches(1))  # after all that
    return found


def test_a_mistake_is_one_error_on_every_rank(ranks, subtests):
    first, second = ranks.run(2, find_errors)
    assert first == second
    *found, coefficients, kinds, norms, steps = first
    for index, (name, error) in enumerate(zip([*MISTAKES, *LOCAL], found, strict=True)):
        with subtests.test(name=name, index=index):
            sentence = MISTAKES[name][1]
            if index >= len(MISTAKES):
                assert error.startswith("DisagreementError: rank 1: ")
                sentence = sentence.replace("got 0.weight", "got 2.weight")
            assert sentence in error
            assert "\n" not in error
    assert coefficients == (
        "DisagreementError: all ranks must have the same correction, got UpdateErrorFeedback("
        "coefficient=1.0) on rank 0 and UpdateErrorFeedback(coefficient=0.5) on rank 1"
    )
    assert "the same correction, got StageMomentum(limit=0.99) on rank 0 and None on" in kinds
    assert "all ranks must have the same max_norm, got 1.0 on rank 0 and None on rank 1" in norms
    assert "the same gradient_accumulation_steps, got 1 on rank 0 and 2 on rank 1" in steps


def test_a_mistake_is_the_same_error_in_one_process(subtests):
    for name, (options, sentence) in MISTAKES.items():
        if name != "a correction with actions":  # which are for two ranks
            with subtests.test(name=name):
                assert sentence in find_error(options)


class Named:
    """An object that is called with names."""

    def __call__(self, parameters, names, /, *rest, lr=0.1, **options):
        assert not rest
        assert not options
        return named_sgd(lr, parameters, names)


class NamedSGD(SGD):
    def __init__(self, params, names, lr=0.1):
        super().__init__([{"params": params, "names": names}], lr=lr)


def named_sgd(lr, parameters, names):
    return SGD([{"params": parameters, "names": names}], lr=lr)


def sgd_or(parameters, names=None, *others):
    assert names is None
    assert not others
    return SGD(parameters, lr=0.1)


FACTORIES = {  # what is called with names, and what is not
    "a function": (lambda parameters, names: named_sgd(0.1, parameters, names), True),
    "a partial function": (partial(named_sgd, 0.1), True),
    "a partial with a keyword": (partial(lambda p, n, lr: named_sgd(lr, p, n), lr=0.1), True),
    "an object": (Named(), True),
    "a method": (Named().__call__, True),
    "a class": (NamedSGD, True),
    "torch's class": (AdamW, False),
    "a partial class": (partial(SGD, lr=0.1), False),
    "a default": (sgd_or, False),
    "a partial with the names": (partial(lambda p, names: SGD(p, lr=0.1), names=[]), False),
    "any arguments": (lambda *args: SGD(*args, lr=0.1), False),
    "several optimizers": (
        lambda p, n: [named_sgd(0.1, p[:1], n[:1]), named_sgd(0.1, p[1:], n[1:])], True),
}  # fmt: skip


@pytest.mark.parametrize("schedule", [GPipe(), PipeDream()])
def test_a_function_of_two_parameters_is_called_with_names(schedule, subtests):
    for what, (optimizer_fn, takes_names) in FACTORIES.items():
        with subtests.test(what):
            trainer = build(schedule, optimizer_fn)
            plain = dict(nn.Sequential(*trainer._arguments.layers).named_parameters())
            for stage, own in zip(trainer.stages, ([0, 1], [2, 3]), strict=True):
                groups = [group for each in stage.optimizers for group in each.param_groups]
                names = [name for group in groups for name in group.get("names", ())]
                expected = [f"{layer}.{kind}" for layer in own for kind in ("weight", "bias")]
                assert names == (expected if takes_names else [])
                for name, parameter in zip(names, stage.optimized, strict=takes_names):
                    assert parameter is plain[name]
            train(trainer, batches(1))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler reads
def test_names_are_those_of_the_model_before_it_was_compiled_or_frozen():
    linears = [torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager") for _ in range(2)]
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), linears[0]), linears[1]]
    layers[0][0].bias.requires_grad_(False)
    seen = []

    def sgd(parameters, names):
        seen.append(names)
        return SGD(parameters, lr=0.1)

    trainer = PipelineTrainer(layers, mse_loss, sgd, PipeOptim(), num_microbatches=1, split=[1])
    assert seen == [["0.0.weight", "0.1.weight", "0.1.bias"], ["1.weight", "1.bias"]]
    trainer.step(*batches(1)[0])
    trainer.flush()
    assert set(trainer.full_state_dict()) == {"0.0.bias", *seen[0], *seen[1]}
    assert trainer.state_dict()["1"]["module"].keys() == {*seen[1]}


def test_a_head_has_names_too():
    schedule = Interlocking(2, nn.Linear(WIDTH, WIDTH))
    trainer = build(schedule, partial(named_sgd, 0.1))
    trainer.prepare(*batches(1)[0])
    names = [group["names"] for stage in trainer.stages for group in stage.optimizer.param_groups]
    own = [[f"{layer}.{kind}" for layer in of for kind in ("weight", "bias")]
           for of in ([0, 1], [2, 3])]  # fmt: skip
    assert names == [[*own[0], "head.weight", "head.bias"], own[1]]


HALVING = partial(LambdaLR, lr_lambda=lambda update: 0.5**update)
RESUMED = [
    (PipeOptim(), {"optimizer_fn": partial(muon_and, FusedAdamW), "max_norm": 0.1}),
    (PipeOptim("consistent"), {"scheduler_fn": HALVING, "correction": StageMomentum()}),
    (PipeDream(), {"scheduler_fn": HALVING, "correction": UpdateErrorFeedback(None)}),
    (PipeOptim("live", LastUpdate()), {"correction": UpdateErrorFeedback(), "nonfinite": "skip"}),
    (OneForwardOneBackward(), {"scheduler_fn": HALVING, "max_norm": 0.1}),
    *((Interlocking(each, nn.Linear(WIDTH, WIDTH)), {"scheduler_fn": HALVING}) for each in (1, 2)),
]


def resume(rank):
    """Return of each case the losses and weights of a run, and of two that go on from its state.

    One from its state, and one from the state that would be rescued after a failure.
    """
    return [resume_with(copy.deepcopy(schedule), options) for schedule, options in RESUMED]


def resume_with(schedule, options):
    trainer, calls = build(schedule, **options), batches(6)
    train(trainer, calls[:2])
    if "nonfinite" in options:
        train(trainer, [(calls[2][0], torch.full_like(calls[2][1], float("nan")))])
    kinds = [type(each).__name__ for stage in trainer.stages for each in stage.optimizers]
    states = [copy.deepcopy(save()) for save in (trainer.state_dict, trainer.rescue_state_dict)]
    found = [(kinds, train(trainer, calls[3:]), weights_of(trainer))]
    for state in states:
        other = build(schedule, **options)
        other.prepare(*calls[0])
        other.load_state_dict(state)
        optimizers = [each for stage in other.stages for each in stage.optimizers]
        rates = [group["lr"] for each in optimizers for group in each.param_groups]
        assert all((rate < 0.02) == ("scheduler_fn" in options) for rate in rates)
        found.append((kinds, train(other, calls[3:]), weights_of(other)))
    return found


@pytest.mark.slow
def test_a_stage_with_several_optimizers_resumes_from_its_state_bitwise(ranks, subtests):
    for rank, of_rank in enumerate(ranks.run(2, resume)):
        for (schedule, options), (run, *others) in zip(RESUMED, of_rank, strict=True):
            with subtests.test(schedule=repr(schedule), options=list(options)):
                assert run[0] == ["Muon", "AdamW"]
                for kinds, losses, weights in others:
                    assert kinds == run[0]
                    assert rank == 0 or losses == run[1]  # rank 0 may know none of a step yet
                    torch.testing.assert_close(weights, run[2], rtol=0, atol=0)


def adamw(parameters):
    return AdamW(parameters, lr=0.02)


def state_of(optimizer_fn):
    trainer = build(PipeDream(), optimizer_fn)
    train(trainer, batches(1))
    return copy.deepcopy(trainer.state_dict())


def test_one_optimizer_and_a_list_of_one_have_the_same_state():
    state = state_of(adamw)
    assert state["0"]["optimizer_kinds"] == ["AdamW"]
    in_list = build(PipeDream(), lambda parameters: [adamw(parameters)])
    in_list.load_state_dict(copy.deepcopy(state))
    saved = in_list.state_dict()
    assert saved["0"]["optimizer_kinds"] == ["AdamW"]
    for key in ("module", "optimizers"):
        torch.testing.assert_close(saved["0"][key], state["0"][key], rtol=0, atol=0)


OTHERS = [
    (adamw, partial(muon_and, AdamW), "Muon, AdamW, got AdamW"),
    (partial(muon_and, AdamW), adamw, "AdamW, got Muon, AdamW"),
    (partial(muon_and, SGD), partial(muon_and, AdamW), "Muon, AdamW, got Muon, SGD"),
    (lambda parameters: muon_and(AdamW, parameters)[::-1], partial(muon_and, AdamW),
     "Muon, AdamW, got AdamW, Muon"),
]  # fmt: skip


def test_the_state_of_other_optimizers_is_refused(subtests):
    for saved, own, kinds in OTHERS:
        with subtests.test(kinds):
            sentence = f"state_dict must be of the same optimizers, {kinds}"
            trainer = build(PipeDream(), own)
            before = weights_of(trainer)
            with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
                trainer.load_state_dict(state_of(saved))
            assert "\n" not in str(caught.value)
            torch.testing.assert_close(weights_of(trainer), before, rtol=0, atol=0)


MALFORMED = [("optimizers", []), ("optimizers", None), ("optimizers", [3, 4]),
             ("optimizer_kinds", ["Muon"]), ("optimizer_kinds", None), ("optimizer_kinds", "Muon"),
             ("schedulers", []), ("schedulers", {}), ("schedulers", [1, 2])]  # fmt: skip


def test_a_malformed_state_of_several_optimizers_is_refused(subtests):
    trainer = build(PipeDream(), scheduler_fn=HALVING)
    train(trainer, batches(1))
    good, before = copy.deepcopy(trainer.state_dict()), weights_of(trainer)
    for key, value in MALFORMED:
        with subtests.test(key=key, value=value):
            state = {
                index: seal({**copy.deepcopy(saved), key: value}) for index, saved in good.items()
            }
            with pytest.raises(ValueError, match="must be ") as caught:
                trainer.load_state_dict(state)
            assert "\n" not in str(caught.value)
            torch.testing.assert_close(weights_of(trainer), before, rtol=0, atol=0)


@pytest.mark.parametrize("value", [1.0, "x", torch.zeros(2, 2)])
def test_a_malformed_last_update_is_refused(value):
    schedule, correction = PipeOptim(prediction=LastUpdate()), UpdateErrorFeedback()
    for name in ("last_update", "last_uncorrected_update"):
        trainer = build(schedule, adamw, correction=correction)
        train(trainer, batches(1))
        state = copy.deepcopy(trainer.state_dict())
        state["0"]["optimizers"][0]["state"][0][name] = value
        state = {index: seal(saved) for index, saved in state.items()}
        with pytest.raises(ValueError, match=f"state.0.{name} must be a tensor of shape"):
            build(schedule, adamw, correction=correction).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"prediction": LastUpdate()}, False),
        ({"correction": UpdateErrorFeedback()}, False),
    ],
)
def test_what_repeats_updates_has_the_host_skip_them(options, expected):
    # On the device a skipped update would be an update of 0.
    schedule = PipeOptim(prediction=options.pop("prediction", Displacement()))
    with as_on_gpus():
        trainer = build(schedule, FusedAdamW, **options)
    assert {stage.options.sends_found_inf for stage in trainer.stages} == {expected}


def test_the_one_optimizer_of_a_stage_with_several_is_an_error():
    stage = build(PipeDream()).stages[0]
    sentence = "optimizer must be read of a stage with one, got 2; read optimizers"
    with pytest.raises(RuntimeError, match=f"^{sentence}$"):
        stage.optimizer  # noqa: B018


class NeedsAnEpoch:
    """A scheduler as timm's are."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        raise AssertionError

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_scheduler_that_needs_a_loss_is_refused_at_the_build_and_may_be_stepped_in_the_loop():
    for scheduler_fn, what in (
        (ReduceLROnPlateau, "ReduceLROnPlateau, whose step needs metrics: leave scheduler_fn out"),
        (NeedsAnEpoch, "NeedsAnEpoch, whose step needs epoch: leave scheduler_fn out"),
    ):
        for schedule in (GPipe(), PipeOptim()):
            with pytest.raises(ValueError, match=f"scheduler_fn must return .*, got {what}"):
                build(schedule, adamw, scheduler_fn=scheduler_fn)
    with pytest.raises(ValueError, match="scheduler_fn must be a function that returns a learn"):
        build(GPipe(), adamw, scheduler_fn=lambda optimizer: None)
    trainer = build(GPipe(), adamw)
    schedulers = [ReduceLROnPlateau(each.optimizer, patience=0) for each in trainer.stages]
    for call in batches(3):
        trainer.step(*call)
        for each in schedulers:
            each.step(1.0)
    rates = [group["lr"] for each in trainer.stages for group in each.optimizer.param_groups]
    assert rates == pytest.approx([0.02 * 0.01] * 2)
