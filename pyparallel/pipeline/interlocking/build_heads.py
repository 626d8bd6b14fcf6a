"""Heads for the stages of a rank: built for what these hand on, and tried before any training."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Value, tensors_of
from ..runtime.loss import Loss
from ..runtime.microbatches import MicrobatchSplitter
from ..runtime.p2p import StageP2P
from ..runtime.stage import check_value
from ..runtime.unchanged import unchanged
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from .heads import Head

_NOTHING: Value = ()  # handed on in place of activations by a stage that found a problem


@dataclass
class BuiltHeads:
    """What came of it on this rank: the heads, or a sentence."""

    heads: dict[int, nn.Module]
    problem: str | None = None
    cause: Exception | None = None


def build_heads(
    modules: Mapping[int, nn.Module],
    heads: Mapping[int, Head],
    loss_fn: Loss,
    layout: PipelineShape,
    feed: MicrobatchSplitter,
    mail: StageP2P,
) -> BuiltHeads:
    """Run the first microbatch through all stages, build every head for it, and take its loss.

    All ranks must call this. Nothing else of it is left: weights, buffers and the states of random
    number generators are as they were. A head is initialized by ``torch.initial_seed()`` and its
    stage, whichever rank builds it.

    Args:
        modules: of this rank's stages.
        heads: of all stages but the last.
        loss_fn: of outputs and targets.
        layout: which stage is where.
        feed: the first call's.
        mail: between stages.
    """
    fitting = BuiltHeads({})
    mail.expect(lambda rank: [Action(s, Kind.FORWARD, 0) for s in layout.stages(rank)])
    for stage, module in modules.items():
        forward = Action(stage, Kind.FORWARD, 0)
        made = _NOTHING
        try:
            value = feed.inputs(0) if stage == 0 else mail.take(forward)
            if value is not _NOTHING and tensors_of(value):
                target = feed.target(0)
                made = _run(module, value)
                if stage in heads:
                    head = _build(heads[stage], made, stage)
                    _try(head, heads[stage], made, target, loss_fn, stage)
                    fitting.heads[stage] = head
        except Exception as error:  # the others must hear of it: they wait for this stage
            fitting.problem = str(error) if isinstance(error, ValueError) else _words(stage, error)
            fitting.cause = error
            made = _NOTHING
        mail.send(forward, made)
    return fitting


def _words(stage: int, error: Exception) -> str:
    return f"stage {stage} failed on the first microbatch: {type(error).__name__}: {error}"


def _run(module: nn.Module, value: Value) -> Value:
    with torch.no_grad(), unchanged([module], tensors_of(value)):
        made = check_value(module(value))
    return tuple(map(torch.detach, made)) if isinstance(made, tuple) else made.detach()


def _build(head: Head, example: Value, stage: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{torch.initial_seed()}/{stage}".encode()))
        try:
            return head.build(example)
        except ValueError as error:
            raise ValueError(f"heads[{stage}]: {error}") from error


def _try(
    module: nn.Module, head: Head, example: Value, target: Value, loss_fn: Loss, stage: int
) -> None:
    """Take the head's loss once.

    Raises:
        ValueError: there is none.
    """
    output: Any = None
    try:
        with torch.no_grad(), unchanged([module], tensors_of(example)):
            output = module(example) if head.shared is None else module(example, head.shared)
            loss = loss_fn(output, target)
    except Exception as error:
        raise ValueError(
            f"heads must give outputs that loss_fn takes: that of stage {stage}, {head!r}, makes "
            f"{_describe(output)} of {_describe(example)}, the target is {_describe(target)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(
            f"heads must give outputs of which loss_fn makes a 0-d tensor, that of stage {stage}, "
            f"{head!r}, makes {_describe(output)}, and the loss is {_describe(loss)}"
        )


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return f"{list(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
