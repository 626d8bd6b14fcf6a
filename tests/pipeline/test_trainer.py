import copy
import inspect
import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, StepLR

from pyparallel.comm import DisagreementError
from pyparallel.compression import TopK
from pyparallel.pipeline import (
    GPipe,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    SpecTrain,
    StageError,
    XPipe,
    parse_action,
)
from pyparallel.planning.pipelines import FromActions
from tests.workers import call_each

adam = partial(torch.optim.AdamW, lr=0.02)


NUM_MICROBATCHES = 3


def build_layers():
    torch.manual_seed(0)
    return [
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Dropout(0.5),
        nn.Linear(8, 3),
    ]


def batches(number, size=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        yield (
            torch.randn(size, 6, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )


def build(schedule, split=(3,), layers=None, optimizer_fn=adam, **options):
    return PipelineTrainer(
        build_layers() if layers is None else layers,
        nn.functional.cross_entropy,
        optimizer_fn,
        schedule,
        num_microbatches=NUM_MICROBATCHES,
        split=split,
        **options,
    )


def train_and_evaluate(rank):
    """Train on uneven batches with evaluations between; return losses and the state."""
    trainer = build(PipeOptim())
    losses = [trainer.step(inputs, target) for inputs, target in batches(2, size=12)]
    losses += [trainer.step(inputs, target) for inputs, target in batches(2, size=7)]
    modes = [module.training for stage in trainer.stages for module in stage.module.modules()]
    before = trainer.evaluate(*next(batches(1)))
    trainer.state_dict()  # refused with microbatches in flight: evaluate has flushed
    assert trainer.evaluate(*next(batches(1))) == before
    assert modes == [m.training for stage in trainer.stages for m in stage.module.modules()]
    losses += [trainer.step(inputs, target) for inputs, target in batches(2, size=12)]
    starts = [span.begin for span in trainer.spans]
    assert starts == sorted(starts)
    trainer.flush()
    return losses, before, trainer.state_dict()


def test_uneven_batches_and_evaluation_between_steps(ranks):
    (first_losses, first_loss, first), (losses, loss, last) = ranks.run(2, train_and_evaluate)
    assert math.isnan(first_losses[0])
    assert first_losses[1:] == losses[:-1]  # an evaluation's are not among them
    assert first_loss == loss
    assert all(0 < each < 5 for each in [*losses, loss])
    whole = nn.Sequential(*build_layers())
    whole.load_state_dict({**first["0"]["module"], **last["1"]["module"]})
    # Each microbatch goes through batch norm once, though the weights change.
    assert whole[1].num_batches_tracked == 6 * NUM_MICROBATCHES


def train_with_defaults(rank):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = PipelineTrainer(copy.deepcopy(whole), nn.functional.cross_entropy, adam)
    optimizer = adam(whole.parameters())
    for inputs, target in batches(3):
        trainer.step(inputs, target)
        optimizer.zero_grad()
        nn.functional.cross_entropy(whole(inputs), target).backward()
        optimizer.step()
    assert len({span.action.microbatch for span in trainer.spans}) == 4
    state = trainer.full_state_dict()
    torch.testing.assert_close(state, {} if rank else dict(whole.state_dict()))


def test_by_default_steps_are_those_of_one_process(ranks):
    ranks.run(2, train_with_defaults)


def a_step_without_gradients_is_refused(rank):
    trainer = build(PipeDream())
    sentence = r"step must not be called inside no_grad\(\), got gradients disabled"
    with torch.no_grad(), pytest.raises(RuntimeError, match=sentence):
        trainer.step(*next(batches(1)))


def parameters_that_leave_their_buffers_are_an_error(rank):
    trainer = build(PipeDream())
    first, second = batches(2)
    trainer.step(*first)
    for stage in trainer.stages:
        for parameter in stage.module.parameters():
            parameter.data = parameter.data.clone()
    sentence = "^stage .*parameters must stay views of their flat buffers, but parameter 0"
    with pytest.raises(StageError, match=sentence):
        trainer.step(*second)


def a_batch_too_small_for_an_automatic_split_is_an_error(rank):
    trainer = build(GPipe(), split=None)
    sentence = "^rank 0.*: inputs must have one number of samples, at least one"
    with pytest.raises(DisagreementError, match=sentence):
        trainer.step(torch.ones(2, 6), torch.ones(2, dtype=torch.long))


def ranks_whose_warm_ups_differ_are_an_error(rank):
    scheduler_fn = partial(LinearLR, total_iters=3 + rank)
    with pytest.raises(DisagreementError, match="same schedule with the warm-up of scheduler_fn"):
        build(PipeOptim(synchronous_updates="warm-up"), scheduler_fn=scheduler_fn)


def wrong_calls_raise_and_change_nothing(rank):
    trainer = build(PipeDream())
    trainer.step(*next(batches(1)))
    for call in (trainer.state_dict, lambda: trainer.load_state_dict({})):
        with pytest.raises(RuntimeError, match="must be called after flush"):
            call()
    trainer.flush()
    trainer.flush()
    with pytest.raises(ValueError, match=f"state must be of stages {rank}, got 7: load it on"):
        trainer.load_state_dict({"7": {}})


def training_continues_after_evaluation_in_inference_mode(rank):
    trainer = build(PipeDream())
    batch = next(batches(1))
    trainer.step(*batch)
    with torch.inference_mode():
        trainer.evaluate(*batch)  # flushes, which runs the first stage's first update
    trainer.step(*batch)
    trainer.flush()


CASES = [
    a_step_without_gradients_is_refused,
    parameters_that_leave_their_buffers_are_an_error,
    a_batch_too_small_for_an_automatic_split_is_an_error,
    ranks_whose_warm_ups_differ_are_an_error,
    wrong_calls_raise_and_change_nothing,
    training_continues_after_evaluation_in_inference_mode,
]


def test_cases(ranks):
    ranks.run(2, call_each, [(case,) for case in CASES])


def shared_layers():
    norm = nn.BatchNorm1d(6)
    return [nn.Sequential(nn.Linear(6, 6), norm), norm]


def one_stage_actions():
    return FromActions((tuple(map(parse_action, ["0F0", "0B0"])),))


MISTAKES = {
    "fewer layers than stages": ({"split": None, "layers": [nn.Linear(6, 3)]}, GPipe(), "layers"),
    "a split out of range": ({"split": (9,)}, GPipe(), "split must"),
    "a split that is no list": ({"split": 5}, GPipe(), "split must be a list"),
    "stages that ranks do not divide": (
        {"split": (1, 2)}, GPipe(),
        "split must make a number of stages that is a multiple of the ranks, got [1, 2], 3 stages"),
    "numbers of layers for a split": ({"split": (3, 2)}, GPipe(), "split must ascend, from 1 or"),
    "an optimizer of the whole model": (
        {"optimizer_fn": lambda _: torch.optim.SGD(build_layers()[0].parameters(), lr=0.1)},
        GPipe(), "optimizer_fn must return optimizers of the parameters that it is called with, "),
    "layers on the meta device": (
        {"split": (1,), "layers": [nn.Linear(6, 6, device="meta"), nn.Linear(6, 3, device="meta")]},
        GPipe(), "layers must be in memory on the rank of their stage, got "),
    "a module with buffers on two stages": (
        {"split": (1,), "layers": shared_layers()}, GPipe(),
        "layers must not share modules with buffers across stages, got BatchNorm1d 1 on stages 0"),
    "a schedule for other sizes": (
        {}, one_stage_actions(), "schedule must be for the trainer's PipelineShape("),
    "a warm-up without a scheduler": (
        {}, PipeOptim(synchronous_updates="warm-up"),
        'synchronous_updates must be a number, not "warm-up", without a scheduler_fn'),
    "a warm-up of a rate that does not rise": (
        {"scheduler_fn": partial(StepLR, step_size=2)}, PipeOptim(synchronous_updates="warm-up"),
        "with a learning rate that rises in 0 updates"),
}  # fmt: skip


def make_each_mistake(rank):
    errors = []
    for options, schedule, _ in MISTAKES.values():
        with pytest.raises(DisagreementError) as caught:
            build(schedule, **options)
        errors.append(str(caught.value))
    return errors


def test_a_mistake_is_one_error_on_every_rank(ranks):
    first, second = ranks.run(2, make_each_mistake)
    assert first == second
    for error, (name, (_, _, message)) in zip(first, MISTAKES.items(), strict=True):
        assert message in error, name
        assert re.match("rank(s 0-1| 0): ", error), name


class InDDP(nn.parallel.DistributedDataParallel):
    """A DistributedDataParallel as made without a process group: only its type matters."""

    def __init__(self):
        nn.Module.__init__(self)


IN_DDP = InDDP()
PLAIN = "the plain module, got DistributedDataParallel; pass ddp.module"
SGD_OBJECT = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
WRONG_TYPES = {
    "a schedule's class": (
        {"schedule": GPipe},
        "schedule must be an object such as OneForwardOneBackward() or PipeOptim(), got the class "
        "GPipe; create an object, GPipe(...)"),
    "a schedule's name": ({"schedule": "gpipe"}, "schedule must be"),
    "an optimizer": (
        {"optimizer_fn": SGD_OBJECT},
        "optimizer_fn must be a function of a list of parameters such as lambda p: "
        "torch.optim.SGD(p, lr=0.1), got an object of SGD"),
    "a loss's class": (
        {"loss_fn": nn.CrossEntropyLoss},
        "loss_fn must be a function of output and target, got the class CrossEntropyLoss; create"),
    "a loss's name": ({"loss_fn": "mse"}, "loss_fn must be a function of output and target, got"),
    "a number for a scheduler": ({"scheduler_fn": 3}, "scheduler_fn must be a function of an"),
    "a compressor's class": (
        {"compress_gradients": TopK},
        "compress_gradients must be an object such as Int8() or Cast(), or None, got the class "
        "TopK; create an object, TopK(...)"),
    "a model": (
        {"layers": nn.Linear(2, 2)},
        "layers must be an nn.Sequential, a list of modules, or a model that torch's pipelining "
        "has split, got Linear(in_features=2, out_features=2, bias=True); give its layers"),
    "a model in DDP": ({"layers": IN_DDP}, f"layers must be {PLAIN}"),
    "a layer in DDP": ({"layers": [nn.ReLU(), IN_DDP]}, f"layers[1] must be {PLAIN}"),
}  # fmt: skip


def with_wrong_type(change):
    arguments = {
        "layers": build_layers(), "loss_fn": nn.functional.mse_loss, "schedule": GPipe(),
        "optimizer_fn": torch.optim.SGD, "num_microbatches": 2, "split": (3,), **change,
    }  # fmt: skip
    PipelineTrainer(**arguments)


def make_every_wrong_type(rank):
    """Return all errors; the last case is wrong on rank 1 alone."""
    found = []
    for change in [each for each, _ in WRONG_TYPES.values()] + [
        {"schedule": GPipe} if rank else {}
    ]:
        with pytest.raises(TypeError) as caught:
            with_wrong_type(change)
        found.append(str(caught.value))
    return found


def test_a_wrong_type_is_one_error_on_every_rank(ranks):
    first, second = ranks.run(2, make_every_wrong_type)
    assert first == second
    for error, (name, (_, sentence)) in zip(first, WRONG_TYPES.items(), strict=False):
        assert sentence in error, name
        assert error.startswith(("ranks 0-1: ", "layers must be")), error
    assert first[-1].startswith("rank 1: schedule must be")


def test_a_wrong_type_is_the_same_error_in_one_process():
    for change, sentence in WRONG_TYPES.values():
        with pytest.raises(TypeError, match=f"^{re.escape(sentence)}"):
            with_wrong_type(change)


def failing_optimizer(parameters):
    raise LookupError("no optimizer")


def test_the_error_of_optimizer_fn_is_the_cause():
    with pytest.raises(ValueError, match="LookupError: no optimizer") as caught:
        build(GPipe(), optimizer_fn=failing_optimizer)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_launched_process_without_a_group_warns_that_it_trains_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sentence = "^torchrun started 2 processes, but no process group is initialized, so this process"
    with pytest.warns(UserWarning, match=sentence) as caught:
        build(GPipe(), split=())
    assert caught[0].filename == inspect.getfile(build)


def test_a_layer_elsewhere_fails_with_the_way_to_skip_its_measurement():
    trainer = build(GPipe(), layers=[nn.Linear(6, 3, device="meta")], split=None)
    with pytest.raises(ValueError, match=r"; give split=\[...\] to skip the measurement$"):
        trainer.step(torch.ones(8, 6), torch.ones(8, dtype=torch.long))


VERSIONED = [PipeDream(), PipeOptim(), SpecTrain(), XPipe(), PipeMare()]


def test_parameters_added_to_an_optimizer_are_an_error_if_their_versions_are_kept(subtests):
    for schedule in [*VERSIONED, OneForwardOneBackward()]:
        with subtests.test(repr(schedule)):
            trainer = build(schedule)
            first, second = batches(2)
            trainer.step(*first)
            added = nn.Parameter(torch.ones(3))
            trainer.stages[0].optimizer.add_param_group({"params": [added]})
            if schedule not in VERSIONED:
                trainer.step(*second)
                continue
            with pytest.raises(StageError, match="the optimizer must hold the parameters that it"):
                trainer.step(*second)
