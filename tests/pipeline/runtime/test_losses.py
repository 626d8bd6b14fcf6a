"""Losses by token over windows of steps, of microbatches without tokens, and with parameters."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from pyparallel.comm import DisagreementError
from pyparallel.gossip import AllReduce
from pyparallel.pipeline import (
    GPipe,
    Interleaved,
    Interlocking,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    ZeroBubble,
)
from tests.cases import slow
from tests.pipeline.runtime.tokens import (
    IGNORED,
    NUM_MICROBATCHES,
    SPLITS,
    VOCAB,
    WIDTH,
    build,
    build_layers,
    close,
    count_tokens,
    cross_entropy,
    parameters_of,
    sgd,
)

MAX_NORM = 0.3


def draw_steps():
    """Return seven batches of six samples, for windows of two steps and a rest.

    The first two have microbatches without tokens, the fourth, fifth and sixth no tokens at all.
    """
    generator = torch.Generator().manual_seed(2)
    steps = []
    for index in range(7):
        ids = torch.randint(0, VOCAB, (6, 5), generator=generator)
        target = torch.randint(0, VOCAB, (6, 5), generator=generator)
        kept = torch.rand(6, 5, generator=generator) < (0.9 if index % 2 else 0.3)
        target = target.masked_fill(~kept, IGNORED)
        target[: (2, 4, 0, 6, 6, 6, 0)[index]] = IGNORED
        steps.append((ids, target))
    return steps


def build_tied():
    """Return layers whose first and last one share a weight, and have one that is frozen."""
    layers = build_layers(partial(nn.Embedding, VOCAB, WIDTH))
    layers[-1].weight = layers[0].weight
    layers[1].requires_grad_(False)
    return layers


def build_dropout():
    """Return layers with a dropout."""
    layers = build_layers(partial(nn.Embedding, VOCAB, WIDTH))
    return [*layers[:2], Dropout(), *layers[2:]]


class Dropout(nn.Module):
    """Dropout of the same features of all samples: what it draws does not depend on the split."""

    def forward(self, value):
        kept = torch.arange(WIDTH) % 3 > 0
        return torch.where(kept, value * 1.5, 0.0) if self.training else value


def build_plain():
    return build_layers(partial(nn.Embedding, VOCAB, WIDTH))


def train_plainly(layers, steps_per_update, max_norm):
    """Return the weights and the losses of one process: the mean over the tokens of a window."""
    model = nn.Sequential(*layers)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    steps, losses = draw_steps(), []
    for first in range(0, len(steps), steps_per_update):
        window = steps[first : first + steps_per_update]
        total = sum(count_tokens(target) for _, target in window)
        for ids, target in window:
            loss = cross_entropy(model(ids), target)
            losses.append(loss.item())
            if count_tokens(target):
                (loss * count_tokens(target) / total).backward()
        if total:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


# Of schedules, layers, steps in an update, and other options by name.
WINDOWS = [
    (ZeroBubble(), build_plain, 1, ""),
    (GPipe(), build_tied, 2, "clip scale"),
    (OneForwardOneBackward(), build_dropout, 1, "clip"),
    (OneForwardOneBackward(), build_plain, 2, ""),
    (ZeroBubble(), build_dropout, 3, "scale"),
    (Interleaved(), build_tied, 2, ""),
]


def train_windows(rank, cases, is_replicated):
    """Return the losses and the weights; replicas take halves of each microbatch's samples."""
    found = []
    for schedule, layers, steps_per_update, names in cases:
        options = {"max_norm": MAX_NORM if "clip" in names else None}
        if "scale" in names:
            options["grad_scaler"] = GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        if is_replicated:
            options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "stage"))
        stages = 4 if isinstance(schedule, Interleaved) else 2
        trainer = PipelineTrainer(
            layers(), cross_entropy, sgd, schedule, loss_weight_fn=count_tokens,
            num_microbatches=NUM_MICROBATCHES, split=[] if is_replicated else SPLITS[stages],
            gradient_accumulation_steps=steps_per_update,
            replicas=AllReduce() if is_replicated else None, **options,
        )  # fmt: skip
        losses = []
        for ids, target in draw_steps():
            own = slice(3 * rank, 3 * rank + 3) if is_replicated else slice(None)
            losses.append(trainer.step(ids[own], target[own]))
        trainer.flush()
        trainer.state_dict()
        found.append((losses, parameters_of(trainer)))
    return found


def check_windows(subtests, cases, by_rank):
    for (schedule, layers, steps, names), *outcomes in zip(cases, *by_rank, strict=True):
        with subtests.test(f"{schedule} {layers.__name__} {steps} {names}"):
            losses, wanted = train_plainly(layers(), steps, MAX_NORM if "clip" in names else None)
            for found, own in outcomes:
                close(own, {name: wanted.get(name, wanted["0.weight"]) for name in own})
                if len(own) < len(wanted) and found[0] is not None:
                    assert found == pytest.approx(losses, rel=1e-12, nan_ok=True)
                    assert [math.isnan(each) for each in found] == [0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("cases", [WINDOWS[:2], slow(WINDOWS[2:])])
def test_an_update_takes_the_mean_over_the_tokens_of_its_steps(ranks, subtests, cases):
    check_windows(subtests, cases, ranks.run(2, train_windows, cases, False))


REPLICATED = [[(GPipe(), build_tied, 2, "clip")], slow([(GPipe(), build_plain, 1, "")])]


@pytest.mark.parametrize("cases", REPLICATED)
def test_an_update_takes_the_mean_over_the_tokens_of_all_replicas(ranks, subtests, cases):
    check_windows(subtests, cases, ranks.run(2, train_windows, cases, True))


def stream(schedule):
    """Train one stage, microbatch by microbatch or step by step."""
    trainer = PipelineTrainer(
        build_plain(), cross_entropy, sgd, schedule, num_microbatches=NUM_MICROBATCHES, split=[],
        loss_weight_fn=count_tokens,
    )  # fmt: skip
    for ids, target in draw_steps():
        trainer.step(ids, target)
    trainer.flush()
    return parameters_of(trainer), trainer.stages[0]


def test_a_microbatch_without_tokens_is_no_update_of_a_schedule_that_streams():
    found, stage = stream(PipeDream())
    model = nn.Sequential(*build_plain())
    optimizer, num_updates = sgd(model.parameters()), 0
    for step in draw_steps():
        parts = (each.tensor_split(NUM_MICROBATCHES) for each in step)
        for ids, target in zip(*parts, strict=True):
            if count_tokens(target):
                cross_entropy(model(ids), target).backward()
                optimizer.step()
                optimizer.zero_grad()
                num_updates += 1
    close(found, dict(model.named_parameters()))
    assert (stage.num_updates, stage.num_skipped) == (num_updates, 21 - num_updates)
    _, of_steps = stream(PipeDream2BW())
    assert (of_steps.num_updates, of_steps.num_skipped) == (4, 3)


def stream_on_ranks(rank):
    """Return, with heads and without, the losses and whether the weights are finite."""
    found = []
    for schedule in (PipeDream(), Interlocking(2, nn.Linear(WIDTH, VOCAB).double())):
        trainer = build(schedule, 2, build_plain())
        losses = [trainer.step(ids, target) for ids, target in draw_steps()]
        trainer.flush()
        is_finite = all(each.isfinite().all() for each in parameters_of(trainer).values())
        found.append((losses, is_finite, trainer.stages[0].num_updates))
    return found


@pytest.mark.slow
def test_microbatches_without_tokens_harm_no_stage(ranks):
    first, last = ranks.run(2, stream_on_ranks)
    assert all(is_finite for _, is_finite, _ in first + last)
    for losses, *_ in last:
        assert any(map(math.isfinite, losses))
    assert first[1][2] == 4, "Interlocking updates once a step"


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output, target):
        return cross_entropy(output * self.t.exp(), target)


scale = nn.Parameter(torch.ones(3, dtype=torch.float64))


def losses_with_parameters(layers):
    """Return losses that train parameters, and whether a stage of the layers trains them too."""
    loss, frozen, teacher = Temperature(), Temperature().requires_grad_(False), Temperature()

    def with_global(output, target):
        return cross_entropy(output, target) * scale.sum()

    def recomputed(output, target):
        return checkpoint(loss, output, target, use_reentrant=False)

    def under_no_grad(output, target):
        with torch.no_grad():
            weight = teacher(output, target)
        return cross_entropy(output, target) * weight

    def penalized(layer, output, target):
        return cross_entropy(output.mul_(2), target) + layer.weight.square().sum()

    return {
        "module": (loss, False),
        "method": (loss.forward, False),
        "partial": (partial(penalized, nn.Linear(2, 2)), False),
        "closure": (lambda output, target: 2 * loss(output, target), False),
        "global": (with_global, False),
        "recomputed": (recomputed, False),
        "another rank's layer": (partial(penalized, layers[1]), False),
        "frozen": (frozen, True),
        "no_grad": (under_no_grad, True),
        "a layer of its stage": (partial(penalized, layers[5]), True),
    }


def train_losses(rank, schedule, names):
    """Return the error of each loss in a step and a flush, and whether the weights have moved."""
    found = {}
    for name in names:
        layers = build_plain()
        loss_fn, _ = losses_with_parameters(layers)[name]
        trainer = build(schedule, 2, layers, loss_fn=loss_fn)
        before, errors = parameters_of(trainer), []
        for call in (partial(trainer.step, *draw_steps()[2]), trainer.flush):
            try:
                call()
            except DisagreementError as error:
                errors.append(str(error))
        after = parameters_of(trainer)
        found[name] = errors, all(torch.equal(after[each], before[each]) for each in before)
    return found


FAST = ["closure", "another rank's layer", "no_grad", "a layer of its stage"]


@pytest.mark.parametrize("schedule", [GPipe(), slow(PipeDream()), slow(ZeroBubble())])
def test_a_loss_that_trains_its_own_parameters_is_one_error_on_all_ranks(ranks, subtests, schedule):
    every = losses_with_parameters(build_plain())
    names = FAST if schedule == GPipe() else list(every)
    first, last = ranks.run(2, train_losses, schedule, names)
    for name in names:
        is_allowed = every[name][1]
        with subtests.test(name):
            assert first[name] == last[name]
            errors, is_unchanged = first[name]
            assert is_unchanged == bool(errors) == (not is_allowed)
            start = "rank 1, step 0: loss_fn must train no parameters but the layers' of its rank"
            assert all(error.startswith(start) for error in errors)


def test_a_loss_may_read_the_layers_of_its_stage():
    layers, wanted = build_plain(), build_plain()
    ids, target = draw_steps()[2]

    def penalty(of_layers, output, target):
        return cross_entropy(output, target) + of_layers[5].weight.square().mean()

    trainer = build(ZeroBubble(), 2, layers, loss_fn=partial(penalty, layers))
    trainer.step(ids, target)
    optimizer = sgd(nn.Sequential(*wanted).parameters())
    penalty(wanted, nn.Sequential(*wanted)(ids), target).backward()
    optimizer.step()
    close([each.weight for each in layers[3:]], [each.weight for each in wanted[3:]])
