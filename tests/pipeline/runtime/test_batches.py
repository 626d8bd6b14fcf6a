"""Arguments by name, microbatches split by the caller, losses by token, and predictions."""

import re
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

from pyparallel.comm import DisagreementError
from pyparallel.pipeline import (
    Displacement,
    GPipe,
    Interleaved,
    Interlocking,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
    StageError,
    ZeroBubble,
)
from tests.cases import slow
from tests.pipeline import reference
from tests.pipeline.jobs import Trained, train_on
from tests.pipeline.oracles import LastStep
from tests.pipeline.runtime.tokens import (
    IGNORED,
    NUM_MICROBATCHES,
    SIZES,
    SPLITS,
    VOCAB,
    WIDTH,
    build,
    build_layers,
    close,
    count_tokens,
    cross_entropy,
    draw_batches,
    parameters_of,
    sgd,
)

FLUSHING = [GPipe(), OneForwardOneBackward(), ZeroBubble(), Interleaved()]
STREAMING = [
    PipeDream(),
    PipeDream2BW(),
    PipeOptim("consistent", Displacement(LastStep())),
    PipeOptim("live", Displacement(LastStep())),
]


def cut(batch, num_parts):
    """Return the microbatches of a batch, each padded to its own longest sample."""
    for ids, mask, target in zip(*(each.tensor_split(num_parts) for each in batch), strict=True):
        longest = mask.sum(1).max()
        yield ids[:, :longest], mask[:, :longest], target[:, :longest]


def given(form, batch, rank):  # noqa: PLR0911 - a form each
    """Return the arguments of a call, of which the ranks may have different ones."""
    ids, mask, target = batch
    parts = list(cut(batch, NUM_MICROBATCHES))
    args = [(part[0],) for part in parts]
    kwargs = [{"mask": part[1], "scale": 0.5} for part in parts]
    targets = [part[2] for part in parts]
    match form:
        case "by name":
            return (ids,), {"mask": mask, "scale": 0.5, "target": target}
        case "by position":
            return (ids, mask), {"scale": 0.5, "target": target}
        case "a loader's dict":
            return ({"ids": ids, "mask": mask, "scale": 0.5}, target), {}
        case "each rank its own":
            own = {"ids": ids, "mask": mask, "scale": 0.5} if rank == 0 else {"target": target}
            return (), own
        case "split":
            return (), {"arg_mbs": args, "kwarg_mbs": kwargs, "target_mbs": targets}
        case "split, each rank its own":  # torch's schedules take kwarg_mbs on every rank
            own = {"arg_mbs": args} if rank == 0 else {"target_mbs": targets}
            return (), {"kwarg_mbs": kwargs, **own}
        case "split on one rank":
            whole = {"ids": ids, "mask": mask, "scale": 0.5}
            own = {"target_mbs": [*target.tensor_split(NUM_MICROBATCHES)]}
            return (), whole if rank == 0 else own
    raise NotImplementedError(form)


FORMS = [
    "by name", "by position", "a loader's dict", "each rank its own", "split",
    "split, each rank its own", "split on one rank",
]  # fmt: skip


def without_target(call):
    args, kwargs = call
    if len(args) == 2 and not kwargs:
        args = args[:1]
    return args, {name: v for name, v in kwargs.items() if not name.startswith("target")}


def train(rank, schedule, form, num_stages):
    """Return the losses, the weights, and then the evaluations and predictions."""
    trainer = build(schedule, num_stages)
    calls = [given(form, batch, rank) for batch in draw_batches()]
    args, kwargs = calls[0]
    trainer.prepare(*args, **kwargs)
    losses = [trainer.step(*args, **kwargs) for args, kwargs in calls]
    evaluated = [trainer.evaluate(*args, **kwargs) for args, kwargs in calls]
    predicted = []
    for call in calls:
        args, kwargs = without_target(call)
        predicted.append(trainer.predict(*args, **kwargs))
    return losses, parameters_of(trainer), evaluated, predicted


def train_in_every_form(rank, forms):
    found = [train(rank, FLUSHING[index % 3], form, 2) for index, form in enumerate(forms)]
    heads = [nn.Linear(WIDTH, VOCAB).double()]
    return [
        *found,
        train(rank, Interleaved(), "by name", 4),
        train(rank, Interlocking(2, heads), "by name", 2),
    ]


def train_unsplit():
    """Return the same of the unsplit model, and its outputs."""
    model = nn.Sequential(*build_layers())
    first, *rest = model
    optimizer, batches = sgd(model.parameters()), list(draw_batches())

    def run(ids, mask):
        value = first(ids, mask, scale=0.5)
        for layer in rest:
            value = layer(value)
        return value

    losses = []
    for ids, mask, target in batches:
        loss = cross_entropy(run(ids, mask), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        outputs = [run(ids, mask) for ids, mask, _ in batches]
    evaluated = [
        cross_entropy(output, batch[2]).item()
        for output, batch in zip(outputs, batches, strict=True)
    ]
    return losses, dict(model.named_parameters()), evaluated, outputs


@pytest.mark.slow
def test_every_form_of_a_batch_trains_like_the_unsplit_model_by_token(ranks, subtests):
    by_rank = ranks.run(2, train_in_every_form, FORMS)
    wanted_losses, weights, wanted_evaluated, outputs = train_unsplit()
    for form, first, last in zip([*FORMS, "interleaved", "interlocking"], *by_rank, strict=True):
        with subtests.test(form):
            losses, own, evaluated, predicted = last
            streams = form == "interlocking"  # the first rank knows a loss one step later
            assert first[0][streams:] == losses[: len(SIZES) - streams]
            assert first[2:] == (evaluated, [None] * len(SIZES))
            assert losses == pytest.approx(wanted_losses, rel=1e-12)
            assert evaluated == pytest.approx(wanted_evaluated, rel=1e-12)
            close({**first[1], **own}, weights)
            for found, output, (_, mask, _) in zip(predicted, outputs, draw_batches(), strict=True):
                if not isinstance(found, list):
                    close(found, output)
                    continue
                parts = output.tensor_split(NUM_MICROBATCHES)
                for each, part, kept in zip(
                    found, parts, mask.tensor_split(NUM_MICROBATCHES), strict=True
                ):
                    close(each, part[:, : kept.sum(1).max()])
            is_list = "split" in form and form != "split on one rank"
            assert [isinstance(each, list) for each in predicted] == [is_list] * len(SIZES)


STREAMED = [(schedule, is_split) for schedule in STREAMING for is_split in (False, True)]


def stream(case, num_stages):
    schedule, is_split = case
    trainer = build(schedule, num_stages, build_layers(partial(nn.Embedding, VOCAB, WIDTH)))
    losses = []
    for ids, mask, target in draw_batches():
        parts = list(cut((ids, mask, target), NUM_MICROBATCHES))
        split = {
            "arg_mbs": [(part[0],) for part in parts],
            "target_mbs": [part[2] for part in parts],
        }
        losses.append(trainer.step(**split) if is_split else trainer.step(ids, target))
    trainer.flush()
    return Trained(losses, parameters_of(trainer))


@cache
def expected(schedule, num_stages):
    return reference.train_in_one_process(
        lambda: build_layers(partial(nn.Embedding, VOCAB, WIDTH)), SPLITS[num_stages],
        cross_entropy, sgd, schedule, [[(ids, target) for ids, _, target in draw_batches()]],
        NUM_MICROBATCHES, weigh=lambda target: count_tokens(target).item(),
    )  # fmt: skip


@pytest.mark.parametrize("size", [(4, 2), *map(slow, [(2, 2), (4, 4)])])
def test_losses_by_token_follow_the_reference(size, ranks, subtests):
    trained = train_on(ranks, size, stream, STREAMED)
    for case, found in zip(STREAMED, trained, strict=True):
        with subtests.test(str(case)):
            wanted = expected(case[0], size[0])
            assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
            close(found.state, {name: wanted.state[name] for name in found.state})
            assert len(found.state) == 9


class Flatten(nn.Module):
    """Returns the tokens of all samples in one dimension."""

    def forward(self, value):
        return value.flatten(0, 1)


class Fork(nn.Module):
    def forward(self, value):
        return value, value.argmax(-1)


def flat_cross_entropy(output, target):
    output = output[0] if isinstance(output, tuple) else output
    return nn.functional.cross_entropy(output, target.flatten(), ignore_index=IGNORED)


def use_rightly(rank):
    """Return losses of tokens in one dimension, and predictions that are tuples and lists."""
    (ids, mask, target), *_ = draw_batches()
    flat = build(
        OneForwardOneBackward(), layers=[*build_layers(), Flatten()], loss_fn=flat_cross_entropy
    )
    parts = list(cut((ids, mask, target), NUM_MICROBATCHES))
    args, targets = [(part[0],) for part in parts], [part[2] for part in parts]
    losses = [
        flat.evaluate(ids, target=target),
        flat.evaluate(arg_mbs=args, target_mbs=targets),
        flat.evaluate(arg_mbs=args, target_mbs=[each.flatten() for each in targets]),
    ]
    errors = []
    plain, tuples = build(GPipe()), build(GPipe(), layers=[*build_layers(), Fork()])
    for trainer, call, kwargs in (
        (plain, (), {"arg_mbs": args} if rank == 0 else {}),
        (plain, (ids,), {"target": target}),
        (plain, (ids, target[:3]), {}),  # a mask
        (plain, (ids[:0],), {}),
    ):
        try:
            trainer.predict(*call, **kwargs)
        except DisagreementError as error:
            errors.append(str(error))
    return losses, errors, tuples.predict(ids), plain.predict(ids, mask), plain.predict(ids[:3])


def test_other_shapes_and_predictions(ranks):
    (_, *first), (losses, *last) = ranks.run(2, use_rightly)
    (ids, mask, target), *_ = draw_batches()
    model = nn.Sequential(*build_layers())
    with torch.no_grad():
        output = model(ids)
        masked = model[1:](model[0](ids, mask))
        assert losses == pytest.approx([cross_entropy(output, target).item()] * 3, rel=1e-12)
    assert first[0] == last[0]
    messages = [
        r"rank 1: the outputs of microbatches must be of one shape but for dimension 0, the batch, "
        r"to be concatenated, got \[3, \d, 11\] and \[2, \d, 11\].*; with arg_mbs or kwarg_mbs, ",
        "rank 0: the arguments must be those .*: got an unexpected keyword argument 'target'$",
        r"rank 0: inputs must have one number of samples, .*, got \[3, 7\]$",
        r"rank 0: inputs must have one number of samples, at least one, got \[0\]$",
    ]
    for message, error in zip(messages, last[0], strict=True):
        assert re.match(message, error)
    assert first[1:] == [None] * 3
    close(last[1], (output, output.argmax(-1)))
    close(last[2], masked)
    close(last[3], output[:3])


SHORT = [
    (GPipe(), {}), (PipeOptim("live", Displacement(LastStep())), {"loss_weight_fn": None}),
    (Interleaved(), {}), (Interlocking(2, nn.Linear(WIDTH, VOCAB).double()), {}),
]  # fmt: skip
MISMATCHED = [(1, 2), (2, 1), (7, 2), (2, 7)]


def use_few(rank):
    """Evaluate and predict one and two samples in three microbatches, between steps."""
    ids, mask, target = next(draw_batches())
    found, errors = [], []
    for schedule, options in SHORT:
        trainer = build(schedule, 4 if schedule == Interleaved() else 2, **options)
        trainer.prepare(ids[:1], target[:1])
        before = parameters_of(trainer)
        for few in (1, 2):
            own = {"mask": mask[:few]} if rank == 0 else {}
            found.append(trainer.evaluate(ids[:few], target=target[:few], **own))
            found.append(trainer.predict(ids[:few], mask[:few]))
        for here, there in MISMATCHED:
            with pytest.raises(DisagreementError) as caught:
                trainer.evaluate(ids[:here], target=target[:there] if rank else None)
            errors.append(str(caught.value))
        with pytest.raises(DisagreementError, match=r"at least one for each of the 3 .*drop_last"):
            trainer.step(ids[:2], target[:2])
        assert all(torch.equal(each, before[name]) for name, each in parameters_of(trainer).items())
        trainer.step(ids, target)
        trainer.flush()
    return found, errors


def test_a_batch_of_fewer_samples_than_microbatches_is_evaluated_as_by_one_process(ranks):
    (first, errors), (last, same_errors) = ranks.run(2, use_few)
    ids, mask, target = next(draw_batches())
    wanted, (embed, *rest) = [], nn.Sequential(*build_layers())
    with torch.no_grad():
        for _, options in SHORT:
            for few in (1, 2):
                output = nn.Sequential(*rest)(embed(ids[:few], mask[:few]))
                if "loss_weight_fn" in options:  # the mean over samples
                    losses = map(cross_entropy, output.split(1), target[:few].split(1))
                    wanted.append(sum(losses).item() / few)
                else:
                    wanted.append(cross_entropy(output, target[:few]).item())
                wanted.append(output)
    assert set(first[1::2]) == {None}
    assert first[::2] == last[::2]
    assert last[::2] == pytest.approx(wanted[::2], rel=1e-12)
    close(last[1::2], wanted[1::2])
    assert errors == same_errors
    assert errors == len(SHORT) * [
        f"rank 1: inputs and target must have the same number of samples, got {here} and {there}: "
        "take both from one batch"
        for here, there in MISMATCHED
    ]


class Hidden(NamedTuple):
    value: torch.Tensor
    mask: torch.Tensor


class Named(nn.Module):
    """A layer that reads the fields of its input, or its positions."""

    def __init__(self, by_name):
        super().__init__()
        self.linear, self.by_name = nn.Linear(4, 4), by_name

    def forward(self, hidden):
        value, mask = (hidden.value, hidden.mask) if self.by_name else hidden
        return Hidden(self.linear(value) * mask, mask)


class Unpack(nn.Module):
    def forward(self, hidden):
        return hidden[0]


def test_a_named_tuple_is_one_in_a_stage_and_its_tensors_between_stages():
    torch.manual_seed(0)
    layers = [Named(True), Named(True), Named(False), Named(True), Unpack()]
    batch = Hidden(torch.randn(6, 4), torch.ones(6, 4))
    plain = nn.Sequential(*layers)(batch).square().mean()
    for split, name in (([2], None), ([4], None), ([1], "value"), ([3], "value")):
        trainer = PipelineTrainer(
            layers, lambda output, target: output.square().mean(), partial(sgd, lr=0.0), GPipe(),
            num_microbatches=2, split=split,
        )  # fmt: skip
        if name is None:
            losses = [trainer.step(batch, batch.mask), trainer.evaluate(batch, batch.mask)]
            assert losses == pytest.approx([plain.item()] * 2)
            continue
        sentence = f"stage 1 .* the first layer of a stage must .*, got one that reads .{name}: unp"
        with pytest.raises(StageError, match=sentence):
            trainer.step(batch, batch.mask)


def test_predict_with_heads_comes_after_prepare():
    ids, _, target = next(draw_batches())
    trainer = build(Interlocking(1, nn.Linear(WIDTH, VOCAB).double()), num_stages=2)
    with pytest.raises(
        RuntimeError, match=r"predict\(\) must come after the first step or prepare"
    ):
        trainer.predict(ids)
    trainer.prepare(ids, target)
    with torch.no_grad():
        close(trainer.predict(ids), nn.Sequential(*build_layers())(ids))


def test_a_loss_weight_fn_must_be_a_function():
    with pytest.raises(TypeError, match="loss_weight_fn must be a function of a target such as"):
        build(GPipe(), loss_weight_fn=0.5)
