"""Checks of a trainer's arguments: each returns a rank's own mistake, for all to raise."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from ..compression import AttachPoint, Compressor
from ..training import find_ddp_error, has_methods, wrong_type
from ..training.nonfinite import find_policy_error
from .arguments import TrainerArguments
from .partition.auto import check_split
from .partition.slice import Tie
from .partition.solver import check_num_stages
from .runtime.stage_layers import StageLayers
from .schedules.schedule import Schedule


def find_argument_error(arguments: TrainerArguments) -> str | TypeError | None:
    """Return what is wrong with a rank's arguments, or None."""
    return (
        _find_type_error(arguments)
        or _find_size_error(arguments)
        or _find_norm_error(arguments.schedule, arguments.max_norm)
        or _find_accumulation_error(arguments.schedule, arguments.gradient_accumulation_steps)
        or _find_scaler_error(arguments.schedule, arguments.grad_scaler)
        or _find_correction_error(arguments.schedule, arguments.correction)
        or _find_compressor_error(arguments.compressors)
        or find_policy_error(arguments.nonfinite, ("raise", "skip"))
    )


def _find_type_error(arguments: TrainerArguments) -> TypeError | None:
    schedule: object = arguments.schedule
    for index, layer in enumerate(arguments.layers):
        if (error := find_ddp_error(f"layers[{index}]", layer)) is not None:
            return error
    if not has_methods(schedule, "step", "update_index", "versions", "validation_error"):
        rule = "an object such as OneForwardOneBackward() or PipeOptim()"
        return wrong_type("schedule", rule, schedule)
    functions = [
        ("loss_fn", arguments.loss_fn, "a function of output and target"),
        ("optimizer_fn", arguments.optimizer_fn,
         "a function of a list of parameters such as lambda p: torch.optim.SGD(p, lr=0.1)"),
        ("scheduler_fn", arguments.scheduler_fn,
         "a function of an optimizer such as lambda o: StepLR(o, 10), or None"),
        ("loss_weight_fn", arguments.loss_weight_fn,
         "a function of a target such as lambda target: (target != -100).sum(), or None"),
    ]  # fmt: skip
    for name, value, rule in functions:
        is_left_out = value is None and rule.endswith("or None")
        if not is_left_out and not callable(value):
            return wrong_type(name, rule, value)
    return None


def _find_size_error(arguments: TrainerArguments) -> str | None:
    num_layers, split = len(arguments.layers), arguments.split
    try:
        shape = arguments.shape
        check_num_stages(num_layers, shape.num_stages)
        if split is not None:
            check_split(split, num_layers, shape.num_stages)
    except ValueError as error:
        return str(error)
    return arguments.schedule.validation_error(shape)


def _find_correction_error(schedule: Schedule, correction: object) -> str | TypeError | None:
    if correction is None:
        return None
    if not has_methods(correction, "wrap"):
        rule = "an object such as UpdateErrorFeedback() or StageMomentum(), or None"
        return wrong_type("correction", rule, correction)
    if why := schedule.option_error("correction"):
        return (
            f"correction must be None with {type(schedule).__name__}, {why}, got "
            f"{correction!r}; leave it out, or take a schedule that does not flush, such as "
            "PipeOptim()"
        )
    return None


def _find_compressor_error(compressors: Mapping[str, object]) -> str | TypeError | None:
    for name, compressor in compressors.items():
        if not isinstance(compressor, Compressor | None):
            rule = "an object such as Int8() or Cast(), or None"
            return wrong_type(name, rule, compressor)
        problem = compressor and compressor.validation_error(AttachPoint.PIPELINE)
        if problem:
            return f"{name}: {problem}"
    return None


def check_skips(
    schedule: Schedule,
    stages: Sequence[StageLayers],
    ties: Sequence[Tie],
    compressors: Mapping[str, Compressor | None],
) -> None:
    """Raise a ValueError if tied weights or skip connections do not fit the other arguments."""
    name = type(schedule).__name__
    skips = [skip for stage in stages for skip in stage.skips_out]
    if ties and (why := schedule.option_error("tied weights")):
        raise ValueError(
            f"layers must not share parameters across stages with {name}, {why}, got {ties[0]}: "
            "move the split, or give each stage its own"
        )
    if skips and (why := schedule.option_error("skip connections")):
        raise ValueError(
            f"layers must have no skip connections between stages with {name}, {why}, got "
            f"{skips[0]!r}: move the split"
        )
    if ties and schedule.delays:
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
    why = schedule.option_error("max_norm")
    return why and (
        f"max_norm must be None with {type(schedule).__name__}, {why}, got {max_norm!r}: clip a "
        "stage's own gradient in a hook of its optimizer (register_step_pre_hook)"
    )


def _find_scaler_error(schedule: Schedule, grad_scaler: object) -> str | TypeError | None:
    if grad_scaler is None:
        return None
    if not has_methods(grad_scaler, "get_scale", "state_dict", "load_state_dict"):
        rule = "a torch.amp.GradScaler, or None"
        return wrong_type("grad_scaler", rule, grad_scaler)
    why = schedule.option_error("grad_scaler")
    return why and (
        f"grad_scaler must be None with {type(schedule).__name__}, {why}, got a GradScaler: use "
        "bfloat16, or a schedule that flushes"
    )


def _find_accumulation_error(schedule: Schedule, steps: object) -> str | TypeError | None:
    if not isinstance(steps, int) or isinstance(steps, bool):
        return wrong_type("gradient_accumulation_steps", "a positive integer", steps)
    if steps < 1:
        return f"gradient_accumulation_steps must be a positive integer, got {steps}"
    why = None if steps == 1 else schedule.option_error("gradient_accumulation_steps")
    return why and (
        f"gradient_accumulation_steps must be 1 with {type(schedule).__name__}, {why}, got "
        f"{steps}: take a schedule that flushes, or PipeDream2BW() with {steps} times the "
        "microbatches in a step"
    )


def check_scalable(optimizers: Iterable[Optimizer]) -> None:
    """Raise a ValueError if a parameter is float16, in which gradients vanish without a scale."""
    groups = (group for each in optimizers for group in each.param_groups)
    dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
    if torch.float16 in dtypes:
        raise ValueError(
            "layers must be float32 with grad_scaler, as gradients in float16 vanish without their "
            "scale, got torch.float16: use torch.autocast"
        )


def check_memory(ties: Sequence[Tie], stages: Sequence[int]) -> None:
    """Raise a ValueError if a tied weight is on the meta device on a rank of a stage with it."""
    for tie in ties:
        if tie.parameter.is_meta and set(stages) & set(tie.stages):
            raise ValueError(
                "layers must have their tied weights in memory on each rank that holds one, got "
                f"{tie} on the meta device: create the weight on this rank's device"
            )
