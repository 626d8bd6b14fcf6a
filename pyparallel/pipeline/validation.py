"""Checks of a trainer's arguments: each returns a rank's own mistake, for all to raise."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..comm import find_ddp_error, has_methods, wrong_type
from ..comm.arguments import find_policy_error
from ..compression import AttachPoint, Compressor
from .partition.auto import check_split
from .partition.slice import Tie
from .partition.solver import check_num_stages
from .runtime.stage import Stage
from .runtime.stage_layers import StageLayers
from .schedules.schedule import Flushing, Schedule
from .schedules.shape import PipelineShape
from .schedules.streaming import Streaming


def find_type_error(
    layers: Sequence[nn.Module],
    schedule: object,
    loss_fn: object,
    optimizer_fn: object,
    scheduler_fn: object,
    loss_weight_fn: object,
) -> TypeError | None:
    """Return the first argument of a wrong type, as an error, or None."""
    for index, layer in enumerate(layers):
        if (error := find_ddp_error(f"layers[{index}]", layer)) is not None:
            return error
    if not has_methods(schedule, "step", "update_index", "versions", "validation_error"):
        rule = "an object such as OneForwardOneBackward() or PipeOptim()"
        return wrong_type("schedule", rule, schedule)
    functions = [
        ("loss_fn", loss_fn, "a function of output and target"),
        ("optimizer_fn", optimizer_fn,
         "a function of a list of parameters such as lambda p: torch.optim.SGD(p, lr=0.1)"),
        ("scheduler_fn", scheduler_fn,
         "a function of an optimizer such as lambda o: StepLR(o, 10), or None"),
        ("loss_weight_fn", loss_weight_fn,
         "a function of a target such as lambda target: (target != -100).sum(), or None"),
    ]  # fmt: skip
    for name, value, rule in functions:
        is_left_out = value is None and rule.endswith("or None")
        if not is_left_out and not callable(value):
            return wrong_type(name, rule, value)
    return None


def find_size_error(
    schedule: Schedule,
    sizes: tuple[int, int, int],
    num_layers: int,
    split: Sequence[int] | None,
) -> str | None:
    """Return why the layers cannot be split so, or the schedule not run so, or None.

    Args:
        schedule: the order of the actions.
        sizes: the numbers of stages, microbatches and ranks.
        num_layers: of the whole model.
        split: where stages 1 and following begin; None: automatic.
    """
    try:
        shape = PipelineShape(*sizes)
        check_num_stages(num_layers, shape.num_stages)
        if split is not None:
            check_split(split, num_layers, shape.num_stages)
    except ValueError as error:
        return str(error)
    return schedule.validation_error(shape)


def find_option_error(
    schedule: Schedule,
    max_norm: object,
    gradient_accumulation_steps: object,
    grad_scaler: object,
    correction: object,
    nonfinite: object,
    compressors: Mapping[str, object],
) -> str | TypeError | None:
    """Return what is wrong with the other arguments, or None."""
    error = _find_norm_error(schedule, max_norm)
    error = error or _find_accumulation_error(schedule, gradient_accumulation_steps)
    error = error or _find_scaler_error(schedule, grad_scaler)
    if error is not None:
        return error
    if correction is not None:
        if not has_methods(correction, "wrap"):
            rule = "an object such as UpdateErrorFeedback() or StageMomentum(), or None"
            return wrong_type("correction", rule, correction)
        if not isinstance(schedule, Streaming):
            return (
                f"correction must be None with {type(schedule).__name__}, whose gradients are not "
                f"delayed, got {correction!r}; leave it out, or take a schedule that does not "
                "flush, such as PipeOptim()"
            )
    for name, compressor in compressors.items():
        if not isinstance(compressor, Compressor | None):
            rule = "an object such as Int8() or Cast(), or None"
            return wrong_type(name, rule, compressor)
        problem = compressor and compressor.validation_error(AttachPoint.PIPELINE)
        if problem:
            return f"{name}: {problem}"
    return find_policy_error(nonfinite, ("raise", "skip"))


def check_skips(
    schedule: Schedule,
    stages: Sequence[StageLayers],
    ties: Sequence[Tie],
    compressors: Mapping[str, Compressor | None],
) -> None:
    """Check that tied weights and skip connections between stages fit the other arguments.

    Raises:
        ValueError: they do not.
    """
    if not isinstance(schedule, Flushing | Streaming):  # Interlocking
        whose = f"with {type(schedule).__name__}, whose stages learn from losses of their own"
        if ties:
            raise ValueError(
                f"layers must not share parameters across stages {whose}, got {ties[0]}: move the "
                "split, or give each stage its own"
            )
        skips = [name for stage in stages for name in stage.skips_out]
        if skips:
            raise ValueError(
                f"layers must have no skip connections between stages {whose}, got {skips[0]!r}: "
                "move the split"
            )
    if ties and isinstance(schedule, Streaming):
        for name, compressor in compressors.items():
            if compressor is not None:
                raise ValueError(
                    f"{name} must be None with a schedule that does not flush and tied weights, "
                    f"which travel with the activations, got {ties[0]}: use a schedule that "
                    "flushes, or move the split"
                )


def _find_norm_error(schedule: Schedule, max_norm: object) -> str | TypeError | None:
    if max_norm is None:
        return None
    rule = "a number above 0, or None"
    if not isinstance(max_norm, int | float) or isinstance(max_norm, bool):
        return wrong_type("max_norm", rule, max_norm)
    if not max_norm > 0:
        return f"max_norm must be {rule}, got {max_norm!r}"
    if isinstance(schedule, Flushing | Streaming):
        return None
    return (
        f"max_norm must be None with {type(schedule).__name__}, whose stages learn from several "
        f"losses, got {max_norm!r}: clip a stage's own gradient in a hook of its optimizer "
        "(register_step_pre_hook)"
    )


def _find_scaler_error(schedule: Schedule, grad_scaler: object) -> str | TypeError | None:
    if grad_scaler is None:
        return None
    if not has_methods(grad_scaler, "get_scale", "state_dict", "load_state_dict"):
        rule = "a torch.amp.GradScaler, or None"
        return wrong_type("grad_scaler", rule, grad_scaler)
    if isinstance(schedule, Flushing):
        return None
    return (
        f"grad_scaler must be None with {type(schedule).__name__}, whose stages update at "
        "different times, so that one that finds an infinity cannot have the others skip their "
        "updates, got a GradScaler: use bfloat16, or a schedule that flushes"
    )


def _find_accumulation_error(schedule: Schedule, steps: object) -> str | TypeError | None:
    if not isinstance(steps, int) or isinstance(steps, bool):
        return wrong_type("gradient_accumulation_steps", "a positive integer", steps)
    if steps < 1:
        return f"gradient_accumulation_steps must be a positive integer, got {steps}"
    if steps == 1 or isinstance(schedule, Flushing):
        return None
    return (
        f"gradient_accumulation_steps must be 1 with {type(schedule).__name__}, which does not "
        f"flush, got {steps}: take a schedule that flushes, or PipeDream2BW() with {steps} times "
        "the microbatches in a step"
    )


def check_scalable(stages: Iterable[Stage]) -> None:
    """Check that the gradients of stages can be divided by a loss scale.

    Raises:
        ValueError: a parameter is float16, in which they would vanish.
    """
    dtypes = {parameter.dtype for stage in stages for parameter in stage.optimized}
    if torch.float16 in dtypes:
        raise ValueError(
            "layers must be float32 with grad_scaler, as gradients in float16 vanish without their "
            "scale, got torch.float16: use torch.autocast"
        )


def check_memory(ties: Sequence[Tie], stages: Sequence[int]) -> None:
    """Check that tied weights are in memory on the ranks of all stages that hold them.

    Raises:
        ValueError: one is on the meta device.
    """
    for tie in ties:
        if tie.parameter.is_meta and set(stages) & set(tie.stages):
            raise ValueError(
                "layers must have their tied weights in memory on each rank that holds one, got "
                f"{tie} on the meta device: create the weight on this rank's device"
            )
