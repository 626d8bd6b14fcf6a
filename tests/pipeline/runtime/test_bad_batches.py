"""Batches that differ between ranks, or that the first layer does not take: one error on all."""

import re
from functools import partial

from torch import nn

from pyparallel.comm import DisagreementError
from pyparallel.pipeline import Displacement, Interlocking, OneForwardOneBackward, PipeOptim
from tests.pipeline.oracles import LastStep
from tests.pipeline.runtime.tokens import IGNORED, VOCAB, WIDTH, build, draw_batches

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
        lambda ids, mask, y, rank: (
            (), {"target": y[:6]} if rank else {"arg_mbs": [(x,) for x in ids.split([3, 2, 2])]}
        ),
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
    "inputs of a wrong dtype": (
        lambda ids, mask, y, rank: ((ids.double(), y), {}),
        "rank 0{}: inputs must be what the layers of the first stage take, got RuntimeError: ",
    ),
    "a pair in a tuple": (
        lambda ids, mask, y, rank: (((ids, y),), {}),
        "rank 0{}: inputs must be what .* target, call step\\(\\*batch\\)$",
    ),
    "a pair in a list": (
        lambda ids, mask, y, rank: (([ids, y],), {}),
        "rank 1{}: target must be given .* target, call step\\(\\*batch\\)$",
    ),
    "labels of a wrong dtype": (
        lambda ids, mask, y, rank: ((ids, y.double()), {}),
        r"rank 1{}: loss_fn must take the outputs of the last stage and the target, got RuntimeE",
    ),
    "labels of no class": (
        lambda ids, mask, y, rank: ((ids, 0 * y + VOCAB), {}),
        r"rank 1{}: loss_fn must take the outputs of the last stage and the target, got IndexE",
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


def mismatch(rank):
    """Return the losses and errors of four stages whose last rank gets a target of one less."""
    found = []
    heads = [nn.Linear(WIDTH, VOCAB).double() for _ in range(3)]
    (ids, _, target), (good, _, wanted), _ = draw_batches()
    for schedule in (PipeOptim("live", Displacement(LastStep())), Interlocking(4, heads)):
        losses, errors = [], []
        for is_mistaken in (True, False):
            trainer = build(schedule, 4)
            losses.append([trainer.step(good, wanted)])
            trainer.flush()
            own = target[:6] if rank == 3 else target
            calls = [partial(trainer.step, ids, own), trainer.flush] if is_mistaken else []
            for call in calls:
                try:
                    call()
                except DisagreementError as error:
                    errors.append(str(error))
            losses[-1].append(trainer.step(good, wanted))
            trainer.flush()
        found.append((losses, errors))
    return found


def test_a_target_of_other_samples_is_found_behind_other_stages(ranks):
    for of_schedule in zip(*ranks.run(4, mismatch), strict=True):
        plain, with_mistake = of_schedule[-1][0]
        assert plain == with_mistake
        for _, errors in of_schedule:
            assert errors == [
                "rank 3, step 1: inputs and target must have the same number of samples, got 7 "
                "and 6: take both from one batch"
            ]
        assert None not in of_schedule[3][0][0]
