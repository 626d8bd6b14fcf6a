"""Gradients of several steps in one update, as a plain loop accumulates them."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from pyparallel.comm import DisagreementError, NonFiniteError
from pyparallel.pipeline import PipelineTrainer
from tests.cases import slow
from tests.pipeline.every_schedule import FLUSHING
from tests.pipeline.jobs import Trained, train_on
from tests.pipeline.models import OPTIMIZERS, SPLITS, as_on_gpus, build_calls, build_layers

STEPS = 3
MAX_NORM = 1.2
HALVING = partial(LambdaLR, lr_lambda=lambda update: 0.5**update)


def calls_with_a_nan():
    """Return twelve batches for four updates and two for a rest; the fifth has a nan."""
    calls = [*build_calls(7, 13), *build_calls(7, 12)]
    calls[4][1][8] = float("nan")
    return calls


def build(schedule, num_stages, **options):
    return PipelineTrainer(
        build_layers(), mse_loss, OPTIMIZERS["momentum"], schedule, num_microbatches=4,
        split=SPLITS[num_stages], max_norm=MAX_NORM, scheduler_fn=HALVING,
        gradient_accumulation_steps=STEPS, **options,
    )  # fmt: skip


def train(schedule, num_stages):
    """Train, and flush at the end; evaluate and refused steps between change nothing."""
    with as_on_gpus(FLUSHING.index(schedule) % 2 == 1):  # some check losses after the step
        trainer, losses = build(schedule, num_stages), []
    short = build_calls(1, 3)[0]
    for number, call in enumerate(calls_with_a_nan()):
        if number in (1, 3):
            with pytest.raises(DisagreementError, match="at least one for each of the 4"):
                trainer.step(*short)
        if number == 4:
            last = dist.get_world_size() - 1
            error = f"rank {last}, step 4: the loss of microbatch .* must be finite, got nan"
            with pytest.raises(NonFiniteError, match=error):
                trainer.step(*call)
        else:
            losses.append(trainer.step(*call))
        if number in (0, 2, 9):
            before = copy.deepcopy([stage.module for stage in trainer.stages])
            trainer.evaluate(*call)
            for stage, module in zip(trainer.stages, before, strict=True):
                torch.testing.assert_close(stage.module.state_dict(), module.state_dict())
        if (number + 1) % STEPS:
            assert not any(span.action.kind.letter == "U" for span in trainer.spans)
            text = f"state_dict.. must be called after an update, .* {(number + 1) % STEPS} of 3"
            for call_on_state in (trainer.state_dict, lambda: trainer.load_state_dict({})):
                with pytest.raises(RuntimeError, match=text):
                    call_on_state()
    trainer.flush()
    trainer.flush()
    saved = trainer.state_dict()
    assert all(state["updates"] == 4 for state in saved.values())
    state = {}
    for stage in trainer.stages:
        state |= {name: value.clone() for name, value in stage.module.state_dict().items()}
    return Trained(losses, state)


def train_plainly():
    """Return the same of the unsplit model, microbatches one by one for the batch norm."""
    model = nn.Sequential(*build_layers())
    optimizer = OPTIMIZERS["momentum"]([p for p in model.parameters() if p.requires_grad])
    scheduler, losses, norms = HALVING(optimizer), [], []
    calls = calls_with_a_nan()
    for number, (inputs, target) in enumerate(calls):
        num_steps, loss = min(STEPS, len(calls) - number // STEPS * STEPS), 0.0
        for x, y in zip(inputs.tensor_split(4), target.tensor_split(4), strict=True):
            of_part = mse_loss(model(x), y) * len(x) / len(inputs)
            if of_part.isfinite():
                (of_part / num_steps).backward()
            loss += of_part.item()
        losses += [loss] if math.isfinite(loss) else []
        if (number + 1) % STEPS == 0 or number + 1 == len(calls):
            if number != 5:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
    assert min(norms) < MAX_NORM < max(norms)
    return losses, model.state_dict()


@pytest.mark.parametrize("size", [(4, 2), *map(slow, [(2, 2), (4, 4), (4, 1)])])
def test_an_update_takes_the_mean_gradient_of_the_steps(ranks, subtests, size):
    losses, wanted = train_plainly()
    for schedule, found in zip(FLUSHING, train_on(ranks, size, train, FLUSHING), strict=True):
        with subtests.test(schedule=str(schedule)):
            assert found.losses == pytest.approx(losses, rel=1e-12)
            torch.testing.assert_close(found.state, wanted, rtol=1e-12, atol=1e-12)
