import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from pyparallel.pipeline import (
    FromActions,
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    PipeDream,
    PipelineTrainer,
    PipeOptim,
    ZeroBubble,
    parse_action,
)
from tests.workers import observe_ranks, run_ranks

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


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def build(schedule, split=(3,), layers=None, **options):
    return PipelineTrainer(
        build_layers() if layers is None else layers,
        nn.functional.cross_entropy,
        adam,
        schedule,
        num_microbatches=NUM_MICROBATCHES,
        split=split,
        **options,
    )


def parameters_of(trainer):
    return {
        name: value.detach().clone()
        for stage in trainer.stages
        for name, value in stage.module.state_dict().items()
    }


def resume(rank, schedule):
    torch.manual_seed(rank)
    trainer = build(schedule)
    for inputs, target in batches(3):
        trainer.step(inputs, target)
    trainer.flush()
    state = copy.deepcopy(trainer.state_dict())
    generator = torch.get_rng_state()
    losses = [trainer.step(inputs, target) for inputs, target in batches(3)]
    trainer.flush()
    other = build(schedule)
    other.load_state_dict(state)
    torch.set_rng_state(generator)
    again = [other.step(inputs, target) for inputs, target in batches(3)]
    other.flush()
    left, right = parameters_of(trainer), parameters_of(other)
    return losses == again and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("schedule", [OneForwardOneBackward(), PipeDream(), PipeOptim()])
def test_a_run_resumes_from_its_state_bitwise(schedule):
    assert run_ranks(2, resume, schedule) == [True, True]


def train_and_evaluate(rank):
    """Train on uneven batches with evaluations between; return losses and the state."""
    trainer = build(PipeOptim())
    losses = [trainer.step(inputs, target) for inputs, target in batches(2, size=12)]
    losses += [trainer.step(inputs, target) for inputs, target in batches(2, size=7)]
    modes = [module.training for stage in trainer.stages for module in stage.module.modules()]
    before = trainer.evaluate(*next(batches(1)))
    assert trainer.evaluate(*next(batches(1))) == before
    assert modes == [m.training for stage in trainer.stages for m in stage.module.modules()]
    losses += [trainer.step(inputs, target) for inputs, target in batches(2, size=12)]
    starts = [span.begin for span in trainer.spans]
    assert starts == sorted(starts)
    trainer.flush()
    return losses, before, trainer.state_dict()


def test_uneven_batches_and_evaluation_between_steps():
    (first_losses, first_loss, first), (losses, loss, last) = run_ranks(2, train_and_evaluate)
    assert first_losses == [None] * 6
    assert first_loss is None
    assert all(0 < each < 5 for each in [*losses, loss])
    whole = nn.Sequential(*build_layers())
    whole.load_state_dict({**first["0"]["module"], **last["1"]["module"]})
    # Each microbatch goes through batch norm once, though the weights change.
    assert whole[1].num_batches_tracked == 6 * NUM_MICROBATCHES


def test_without_a_process_group_a_single_process_holds_all_stages():
    trainer = build(GPipe(), split=(2, 3, 5))
    model = nn.Sequential(*build_layers())
    optimizer = adam(model.parameters())
    for inputs, target in batches(3):
        torch.manual_seed(7)
        loss = trainer.step(inputs, target)
        torch.manual_seed(7)
        expected = 0.0
        parts = zip(
            inputs.tensor_split(NUM_MICROBATCHES),
            target.tensor_split(NUM_MICROBATCHES),
            strict=True,
        )
        for part, goal in parts:
            share = nn.functional.cross_entropy(model(part), goal) * (len(goal) / len(target))
            share.backward()
            expected += share.item()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(expected)


class Fork(nn.Module):
    """Returns a tuple with a mask, an unused tensor and a detached one."""

    def forward(self, x):
        return x, x > 0, 2 * x, x.detach()


class Merge(nn.Module):
    def forward(self, values):
        x, mask, _, detached = values
        return x * mask + detached


def send_tuples(rank, schedule):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Fork(), Merge(), nn.Linear(6, 3)]
    trainer = build(schedule, split=(2,), layers=copy.deepcopy(layers))
    alone = PipelineTrainer(
        [nn.Sequential(*layers)], nn.functional.cross_entropy, adam, GPipe(),
        num_microbatches=NUM_MICROBATCHES, split=(), process_group=torch.distributed.new_group([0]),
    ) if rank == 0 else None  # fmt: skip
    if rank == 1:
        torch.distributed.new_group([0])
    for inputs, target in batches(3):
        trainer.step(inputs, target)
        if alone:
            alone.step(inputs, target)
    trainer.flush()
    return parameters_of(trainer), alone and parameters_of(alone)


@pytest.mark.parametrize("schedule", [GPipe(), ZeroBubble()])
def test_tuples_are_sent_between_stages(schedule):
    (first, alone), (last, _) = run_ranks(2, send_tuples, schedule)
    for name, value in {**first, **last}.items():
        torch.testing.assert_close(value, alone["0." + name])


def wrap(rank, kind):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 3)]
    if kind == "compiled":
        layers[1] = torch.compile(layers[1])
    if kind == "recomputed":
        layers[1] = Recomputed(layers[1])
    if kind == "bfloat16":
        layers = [layer.bfloat16() for layer in layers]
    trainer = build(PipeOptim("consistent"), split=(2,), layers=layers)
    losses = []
    for inputs, target in batches(4):
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        losses.append(trainer.step(inputs.to(dtype), target))
    trainer.flush()
    return losses


class Recomputed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.module, x, use_reentrant=False)


def test_recomputed_compiled_and_low_precision_stages():
    plain = run_ranks(2, wrap, "plain")[1]
    assert run_ranks(2, wrap, "recomputed")[1] == plain
    assert run_ranks(2, wrap, "compiled", time_limit=200)[1] == pytest.approx(plain, rel=1e-4)
    assert run_ranks(2, wrap, "bfloat16")[1] == pytest.approx(plain, rel=0.1)


def step_without_gradients(rank):
    trainer = build(PipeDream())
    with torch.no_grad():
        trainer.step(*next(batches(1)))


def test_a_step_without_gradients_is_refused():
    outcomes = observe_ranks(2, step_without_gradients, time_limit=40, group_timeout=10)
    for outcome in outcomes:
        assert "step must not be called inside no_grad(), got gradients disabled" in outcome.error


def replace_parameter_data(rank):
    trainer = build(PipeDream())
    for batch in batches(2):
        trainer.step(*batch)
        for stage in trainer.stages:
            for parameter in stage.module.parameters():
                parameter.data = parameter.data.clone()


def test_parameters_that_leave_their_buffers_are_an_error():
    for outcome in observe_ranks(2, replace_parameter_data, time_limit=40, group_timeout=10):
        assert outcome.error.startswith("StageError: stage ")
        assert "parameters must stay views of their flat buffers, but parameter 0" in outcome.error


def split_automatically(rank):
    trainer = build(OneForwardOneBackward(), split=None)
    assert trainer.stages == []
    assert trainer.split is None
    for inputs, target in batches(2):
        trainer.step(inputs, target)
    assert len(trainer.split) == 1
    return len(parameters_of(trainer))


def test_an_automatic_split_holds_every_layer():
    assert sum(run_ranks(2, split_automatically)) == len(
        nn.Sequential(*build_layers()).state_dict()
    )


def shared_layers():
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return [first, last]


def one_stage_actions():
    return FromActions((tuple(map(parse_action, ["0F0", "0B0"])),))


def step_on_a_small_batch(rank):
    build(GPipe(), split=None).step(torch.ones(2, 6), torch.ones(2, dtype=torch.long))


def test_a_batch_too_small_for_an_automatic_split_is_one_error():
    outcomes = observe_ranks(2, step_on_a_small_batch, time_limit=40, group_timeout=10)
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "rank 0: inputs must have one number of samples, at least one" in outcomes[0].error


class UnknownOptimizer(torch.optim.Rprop):
    pass


MISTAKES = {
    "fewer layers than stages": ({"split": None, "layers": [nn.Linear(6, 3)]}, GPipe(), "layers"),
    "a split out of range": ({"split": (9,)}, GPipe(), "split must"),
    "a split that descends": ({"split": (3, 2, 4)}, GPipe(), "split must"),
    "stages that ranks do not divide": (
        {"split": (1, 2)}, GPipe(),
        "num_stages must be a multiple of num_ranks, got 3 stages for 2 ranks"),
    "a parameter on two stages": (
        {"split": (1,), "layers": shared_layers()}, GPipe(),
        "layers must not share parameters across"),
    "a schedule for other sizes": (
        {}, one_stage_actions(), "schedule must be for the trainer's PipelineShape("),
}  # fmt: skip


def start(rank, options, schedule):
    build(schedule, **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error_on_every_rank(name):
    options, schedule, message = MISTAKES[name]
    outcomes = observe_ranks(2, start, options, schedule, time_limit=40, group_timeout=10)
    assert len({outcome.error for outcome in outcomes}) == 1
    assert message in outcomes[0].error
    assert outcomes[0].error.startswith("DisagreementError: rank 0")


def start_with(rank, optimizer_fn, schedule):
    PipelineTrainer(
        build_layers(), nn.functional.cross_entropy, optimizer_fn, schedule,
        num_microbatches=NUM_MICROBATCHES, split=(3,),
    )  # fmt: skip


def test_the_error_names_an_optimizer_that_cannot_be_predicted():
    outcomes = observe_ranks(
        2, start_with, UnknownOptimizer, PipeOptim(), time_limit=40, group_timeout=10
    )
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "UnknownOptimizer" in outcomes[0].error


def differ(rank):
    build(GPipe() if rank else Interleaved())


def test_the_error_names_schedules_that_differ():
    outcomes = observe_ranks(2, differ, time_limit=40, group_timeout=10)
    assert {outcome.error for outcome in outcomes} == {
        "DisagreementError: all ranks must have the same schedule, got Interleaved() on rank 0 and "
        "GPipe() on rank 1"
    }


def make_wrong_calls(rank):
    trainer = build(PipeDream())
    trainer.step(*next(batches(1)))
    for call in (trainer.state_dict, lambda: trainer.load_state_dict({})):
        with pytest.raises(RuntimeError, match="must be called after flush"):
            call()
    trainer.flush()
    trainer.flush()
    with pytest.raises(ValueError, match=f"state must be of stages {rank}, got 7: load it on"):
        trainer.load_state_dict({"7": {}})
    return True


def test_wrong_calls_raise_and_change_nothing():
    assert run_ranks(2, make_wrong_calls) == [True, True]


def evaluate_in_inference_mode(rank):
    trainer = build(PipeDream())
    batch = next(batches(1))
    trainer.step(*batch)
    with torch.inference_mode():
        trainer.evaluate(*batch)  # flushes, which runs the first stage's first update
    trainer.step(*batch)
    trainer.flush()
    return True


def test_training_continues_after_evaluation_in_inference_mode():
    assert run_ranks(2, evaluate_in_inference_mode) == [True, True]


def test_a_trainer_is_freed_with_its_last_reference():
    trainer = build(PipeDream())
    trainer.step(*next(batches(1)))
    trainer.flush()
    reference = weakref.ref(trainer)
    gc.disable()  # until a collection, process groups and their threads would live
    try:
        del trainer
        assert reference() is None
    finally:
        gc.enable()


def failing_optimizer(parameters):
    raise LookupError("no optimizer")


def test_the_error_of_optimizer_fn_is_the_cause():
    with pytest.raises(ValueError, match="LookupError: no optimizer") as caught:
        PipelineTrainer(
            build_layers(), nn.functional.cross_entropy, failing_optimizer, GPipe(),
            num_microbatches=1, split=(3,),
        )  # fmt: skip
    assert isinstance(caught.value.__cause__, LookupError)
