"""Building the heads of a rank's stages for their outputs, and checking them before training."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...training.arguments import require, summarize
from ..messages import Value, tensors_of
from ..messages.endpoints import destinations_of, source_of
from ..messages.format import Refusal
from ..messages.stage_p2p import StageP2P
from ..runtime.inputs import Inputs, call_module, input_tensors
from ..runtime.loss import Loss
from ..runtime.microbatches import MicrobatchSplitter
from ..runtime.preserve_state import preserving_state
from ..runtime.values import check_value
from ..schedules.action import Action, Kind
from ..schedules.shape import PipelineShape
from .heads import Head

_NOTHING: Value = ()  # sent instead of activations by a stage that found a problem


def build_heads(
    modules: Mapping[int, nn.Module],
    heads: Mapping[int, Head],
    loss_fn: Loss,
    shape: PipelineShape,
    splitter: MicrobatchSplitter,
    p2p: StageP2P,
) -> dict[int, nn.Module]:
    """Run the first microbatch through all stages; return heads built for it, by stage.

    All ranks call this; modules and random number generators are restored. A head is initialized by
    ``torch.initial_seed()`` and its stage alone. A stage or a head that fails is a ValueError.
    """
    built: dict[int, nn.Module] = {}
    problem, cause = None, None
    p2p.expect(lambda rank: [Action(s, Kind.FORWARD, 0) for s in shape.stages(rank)])
    for stage, module in modules.items():
        forward = Action(stage, Kind.FORWARD, 0)
        output = _NOTHING
        try:
            value = splitter.inputs(0) if stage == 0 else p2p.recv(source_of(forward), 0)
            assert not isinstance(value, Refusal), "no rank refuses before the stages are built"
            if value is not _NOTHING and input_tensors(value):
                target = splitter.target(0)
                output = _run(module, value)
                if stage in heads:
                    head = _build(heads[stage], output, stage)
                    _check_loss(head, heads[stage], output, target, loss_fn, stage)
                    built[stage] = head
        except Exception as error:  # later stages wait for this one's output
            problem = str(error)
            if not isinstance(error, ValueError):
                kind = type(error).__name__
                problem = f"stage {stage} failed on the first microbatch: {kind}: {error}"
            cause, output = error, _NOTHING
        for endpoint in destinations_of(forward):
            p2p.send(endpoint, 0, output)
    if problem is not None:
        raise ValueError(problem) from cause
    return built


def check_trained_apart(heads: Mapping[int, nn.Module], modules: Sequence[nn.Module]) -> None:
    """Raise a ValueError if heads train parameters of the stages, given all of them."""
    homes = {p: stage for stage, module in enumerate(modules) for p in module.parameters()}
    for stage, head in heads.items():
        for parameter in head.parameters():
            if parameter in homes and parameter.requires_grad:
                raise ValueError(
                    "heads must not hold parameters of the layers, as they learn from another "
                    f"loss, got one of stage {homes[parameter]} in the head of stage {stage}: "
                    "TiedHead(embedding) reads an embedding of theirs"
                )


def _run(module: nn.Module, value: Inputs) -> Value:
    with torch.no_grad(), preserving_state([module], input_tensors(value)):
        output = check_value(call_module(module, value))
    return tuple(map(torch.detach, output)) if isinstance(output, tuple) else output.detach()


def _build(head: Head, example: Value, stage: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which seeds the generators of devices too.
        torch.default_generator.manual_seed(zlib.crc32(f"{torch.initial_seed()}/{stage}".encode()))
        try:
            return head.build(example)
        except ValueError as error:
            raise ValueError(f"heads[{stage}]: {error}") from error


def _check_loss(
    module: nn.Module, head: Head, example: Value, target: Value, loss_fn: Loss, stage: int
) -> None:
    output: Any = None
    try:
        with torch.no_grad(), preserving_state([module], tensors_of(example)):
            output = module(example) if head.shared is None else module(example, head.shared)
            loss = loss_fn(output, target)
    except Exception as error:
        raise ValueError(
            f"heads must return outputs that loss_fn takes: that of stage {stage}, {head!r}, "
            f"returns {summarize(output)} for {summarize(example)}, the target is "
            f"{summarize(target)}: {type(error).__name__}: {error}"
        ) from error
    rule = "heads must return outputs for which loss_fn returns a 0-d tensor"
    of = f"{summarize(output)} from that of stage {stage}, {head!r}"
    require(isinstance(loss, Tensor) and not loss.dim(), rule, f"{summarize(loss)} for {of}")
