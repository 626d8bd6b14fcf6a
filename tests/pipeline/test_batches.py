"""Arguments by name, microbatches split by the caller, losses by token, and predictions."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from pyparallel.comm import DisagreementError
from pyparallel.pipeline import (
    Displacement,
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
    ZeroBubble,
)
from tests.pipeline import reference
from tests.pipeline.oracles import LastStep

VOCAB, WIDTH, NUM_MICROBATCHES = 11, 6, 3
IGNORED = -100
SIZES = [(7, 5), (3, 9), (5, 4)]  # samples and tokens of each batch
FLUSHING = [GPipe(), OneForwardOneBackward(), ZeroBubble(), Interleaved()]
STREAMING = [
    PipeDream(),
    PipeDream2BW(),
    PipeOptim("consistent", Displacement(LastStep())),
    PipeOptim("live", Displacement(LastStep())),
]


class Embed(nn.Module):
    """A first layer of several arguments, which checks one of them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def find_input_error(self, ids, mask=None, *, scale=1.0):
        if mask is not None and mask.shape != ids.shape:
            return f"mask must be of the shape of ids, {list(ids.shape)}, got {list(mask.shape)}"
        return None

    def forward(self, ids, mask=None, *, scale=1.0):
        value = scale * self.table(ids)
        return value if mask is None else value * mask[..., None]


def build_layers(first=Embed):
    torch.manual_seed(4)
    layers = [first(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(
        WIDTH), nn.Linear(WIDTH, VOCAB)]  # fmt: skip
    return [layer.double() for layer in layers]


SPLITS = {2: [3], 4: [1, 3, 4]}  # by the number of stages


def cross_entropy(output, target):
    """Return the mean over the tokens of a microbatch."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def count_tokens(target):
    return (target != IGNORED).sum()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def build(schedule, num_stages=2, layers=None, **options):
    options = {"loss_weight_fn": count_tokens, "loss_fn": cross_entropy, **options}
    return PipelineTrainer(
        build_layers() if layers is None else layers, options.pop("loss_fn"), sgd, schedule,
        num_microbatches=NUM_MICROBATCHES, split=SPLITS[num_stages], **options,
    )  # fmt: skip


def draw_batches():
    """Return ids, mask and target of each batch; samples differ in their number of tokens."""
    generator = torch.Generator().manual_seed(8)
    for samples, tokens in SIZES:
        ids = torch.randint(0, VOCAB, (samples, tokens), generator=generator)
        target = torch.randint(0, VOCAB, (samples, tokens), generator=generator)
        lengths = torch.randint(1, tokens + 1, (samples,), generator=generator)
        mask = torch.arange(tokens) < lengths[:, None]
        yield ids, mask, target.masked_fill(~mask, IGNORED)


def cut(batch, num_parts):
    """Return the microbatches of a batch, each padded to its own longest sample."""
    for ids, mask, target in zip(*(each.tensor_split(num_parts) for each in batch), strict=True):
        longest = mask.sum(1).max()
        yield ids[:, :longest], mask[:, :longest], target[:, :longest]


def given(form, batch, rank):
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


def parameters_of(trainer):
    return {
        name: each.detach().clone()
        for stage in trainer.stages
        for name, each in stage.module.named_parameters()
    }


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
    return [*found, train(rank, Interleaved(), "by name", 4)]


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


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_every_form_of_a_batch_trains_like_the_unsplit_model_by_token(ranks, subtests):
    by_rank = ranks.run(2, train_in_every_form, FORMS)
    wanted_losses, weights, wanted_evaluated, outputs = train_unsplit()
    for form, first, last in zip([*FORMS, "interleaved"], *by_rank, strict=True):
        with subtests.test(form):
            losses, own, evaluated, predicted = last
            assert first[0] == first[2] == first[3] == [None] * len(SIZES)
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


def stream(rank, schedules, num_stages):
    found = []
    for schedule in schedules:
        trainer = build(schedule, num_stages, build_layers(partial(nn.Embedding, VOCAB, WIDTH)))
        losses = [trainer.step(ids, target) for ids, _, target in draw_batches()]
        trainer.flush()
        found.append((losses, parameters_of(trainer)))
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_losses_by_token_follow_the_reference_with_explicit_history(ranks, subtests, num_ranks):
    by_rank = ranks.run(num_ranks, stream, STREAMING, num_ranks)
    for schedule, *found in zip(STREAMING, *by_rank, strict=True):
        with subtests.test(str(schedule)):
            wanted = reference.train_in_one_process(
                lambda: build_layers(partial(nn.Embedding, VOCAB, WIDTH)), SPLITS[num_ranks],
                cross_entropy, sgd, schedule,
                [[(ids, target) for ids, _, target in draw_batches()]], NUM_MICROBATCHES,
                weigh=lambda target: count_tokens(target).item(),
            )  # fmt: skip
            assert found[-1][0] == pytest.approx(wanted.losses, rel=1e-12)
            weights = {name: each for _, own in found for name, each in own.items()}
            close(weights, {name: wanted.state[name] for name in weights})
            assert len(weights) == 9


MISTAKES = {  # of a batch on a rank, with 7 samples: the arguments, and the error on every rank
    "samples": (
        lambda ids, mask, y, rank: ((ids, y[:6]) if rank else (ids, None), {}),
        "rank 1{}: inputs and target must have the same number of samples, got 7 and 6: take both",
    ),
    "samples on the first rank": (
        lambda ids, mask, y, rank: ((ids, y[:6]), {}),
        "rank 0{}: inputs and target must have the same number of samples, got 7 and 6: take both",
    ),
    "microbatches of other samples": (
        lambda ids, mask, y, rank: ((), {
            "arg_mbs": [(each,) for each in ids.split([3, 2, 2])]} if rank == 0 else {"target": y[:6]}),
        "rank 1{}: inputs and target must have the same number of samples, got 7 and 6: take both",
    ),
    "microbatches in another order": (
        lambda ids, mask, y, rank: ((), {
            "arg_mbs": [(each,) for each in ids.split([2, 3, 2])]} if rank == 0 else {"target": y}),
        "rank 1{}: microbatch \\d+ of inputs and target must have the same number of samples, got "
        "2 and 3: take both",
    ),
    "a second argument on one rank": (
        lambda ids, mask, y, rank: ((), {"target": y}) if rank else ((ids, mask), {}),
        "rank 1{}: target must be given by name on every rank or on none, got a second argument",
    ),
    "a mask of another shape": (
        lambda ids, mask, y, rank: ((ids,), {"mask": mask[:, 1:], "target": y}),
        r"rank 0{}: mask must be of the shape of ids, \[7, 5\], got \[7, 4\]$",
    ),
    "a microbatch's mask of another shape": (
        lambda ids, mask, y, rank: ((), {
            "arg_mbs": [(ids[:3], mask[:3]), (ids[3:5], mask[:1]), (ids[5:], mask[5:])],
            "target_mbs": [y[:3], y[3:5], y[5:]]}),
        r"rank 0{}: microbatch \d+: mask must be of the shape of ids, \[2, 5\], got \[1, 5\]$",
    ),
    "a check that fails": (
        lambda ids, mask, y, rank: ((ids,), {"mask": "none", "target": y}),
        "rank 0{}: find_input_error of the first layer, Embed, must return a str or None, got "
        "AttributeError: 'str' object has no attribute 'shape'$",
    ),
    "today's keyword": (
        lambda ids, mask, y, rank: ((), {"inputs": ids, "target": y}),
        r"rank 0{}: the arguments must be those of the first layer, Embed\(ids, mask, scale\), got "
        "0 by position and inputs by name: missing a required argument: 'ids'$",
    ),
    "an unknown keyword": (
        lambda ids, mask, y, rank: ((ids,), {"losses": [], "target": y}),
        "rank 0{}: the arguments must be .*, got 1 by position and losses by name: got an "
        "unexpected keyword argument 'losses'$",
    ),
    "too few microbatches": (
        lambda ids, mask, y, rank: ((), {"arg_mbs": [(ids,)], "target_mbs": [y]}),
        "rank 0{}: arg_mbs must be a list with an entry for each of the 3 microbatches, got 1$",
    ),
    "too few targets": (
        lambda ids, mask, y, rank: ((), {"target_mbs": [y]} if rank else {"arg_mbs": [(ids,)] * 3}),
        "rank 1{}: target_mbs must be a list with an entry for each of the 3 microbatches, got 1$",
    ),
    "microbatches in a tensor": (
        lambda ids, mask, y, rank: ((), {"arg_mbs": ids, "target_mbs": [y] * 3}),
        "rank 0{}: arg_mbs must be a list with an entry for each microbatch, got a tensor of shape",
    ),
    "arguments without a tuple": (
        lambda ids, mask, y, rank: ((), {"arg_mbs": [ids] * 3, "target_mbs": [y] * 3}),
        r"rank 0{}: arg_mbs\[0\] must be a tuple of arguments, such as \(x,\), got a tensor",
    ),
    "keyword arguments without a dict": (
        lambda ids, mask, y, rank: ((), {"kwarg_mbs": [ids] * 3, "target_mbs": [y] * 3}),
        r"rank 0{}: kwarg_mbs\[0\] must be a dict of keyword arguments, got a tensor",
    ),
    "a target that is no tensor": (
        lambda ids, mask, y, rank: ((), {"target_mbs": [y, 1, y]} if rank else {"ids": ids}),
        r"rank 1{}: target_mbs\[1\] must be a tensor, or a tuple, list or dict of tensors, got 1$",
    ),
    "both kinds": (
        lambda ids, mask, y, rank: ((ids,), {"target_mbs": [y] * 3}),
        "rank 0{}: arg_mbs, kwarg_mbs and target_mbs must be given without a whole batch, got both",
    ),
    "both kinds on the last rank": (
        lambda ids, mask, y, rank: (
            (), {"target": y, "target_mbs": [y] * 3} if rank else {"arg_mbs": [(ids,)] * 3}
        ),
        "rank 1{}: arg_mbs, kwarg_mbs and target_mbs must be given without a whole batch, got both",
    ),
    "a microbatch without tokens": (
        lambda ids, mask, y, rank: ((ids, y.index_fill(0, torch.tensor([3, 4]), IGNORED)), {}),
        "rank 1{}: loss_weight_fn must return a positive, finite number for the target of each "
        r"microbatch, got 0 for microbatch \d+$",
    ),
    "a weight that fails": (
        lambda ids, mask, y, rank: ((ids, {"labels": y}), {}),
        r"rank 1{}: loss_weight_fn must return .*, got \w+Error: .* for microbatch \d+$",
    ),
}  # fmt: skip


def make_mistakes(rank, schedules):
    """Return of each schedule the losses of good steps, and the errors of each mistake."""
    (ids, mask, target), good, _ = draw_batches()
    target = target.masked_fill(target == IGNORED, 0)
    found = []
    for schedule in schedules:
        trainer, errors, losses = build(schedule), {}, []
        for name, (call, _) in MISTAKES.items():
            losses.append(trainer.step(good[0], good[2]))
            trainer.flush()
            args, kwargs = call(ids, mask, target, rank)
            raised = errors[name] = []
            for attempt in (
                partial(trainer.step, *args, **kwargs), trainer.flush,
                partial(trainer.evaluate, *args, **kwargs),
            ):  # fmt: skip
                try:
                    attempt()
                except DisagreementError as error:
                    raised.append(str(error))
        losses.append(trainer.step(good[0], good[2]))
        trainer.flush()
        without = build(schedule)
        wanted = []
        for _ in losses:
            wanted.append(without.step(good[0], good[2]))
            without.flush()
        found.append((losses, wanted, errors))
    return found


def test_each_mistake_is_one_error_on_every_rank_and_harms_nothing(ranks, subtests):
    schedules = [OneForwardOneBackward(), PipeOptim("live", Displacement(LastStep()))]
    by_rank = ranks.run(2, make_mistakes, schedules)
    for schedule, (_, _, first), (losses, wanted, last) in zip(schedules, *by_rank, strict=True):
        assert losses == wanted
        for name, (_, message) in MISTAKES.items():
            with subtests.test(f"{type(schedule).__name__}: {name}"):
                assert first[name] == last[name]
                in_step, in_evaluate = first[name]
                assert re.match(message.format(r", step \d+"), in_step)
                assert re.match(message.format(""), in_evaluate)
