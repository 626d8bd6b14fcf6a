"""Checks of a trainer's arguments: each returns a rank's own mistake, for all to raise."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from ..compression import AttachPoint, Compressor
from ..training import find_ddp_error, has_methods, wrong_type
from ..training.arguments import (
    check_callable,
    check_integer,
    check_type,
    find_error,
    is_number,
    raise_problem,
    require,
)
from ..training.module_checks import check_whole
from ..training.nonfinite import find_policy_error
from .arguments import TrainerArguments
from .partition.auto import check_split
from .partition.slice import Tie
from .partition.solver import check_num_stages
from .replicas import place_of_replicas
from .runtime.build_stage import find_warm_up
from .runtime.stage_layers import StageLayers
from .schedules.schedule import Schedule, find_option_error


def find_argument_error(arguments: TrainerArguments) -> str | TypeError | None:
    """Return what is wrong with a rank's arguments, or None."""
    return find_error(lambda: _check_arguments(arguments))


def _check_arguments(arguments: TrainerArguments) -> None:
    _check_types(arguments)
    num_layers, split, num_stages = len(arguments.layers), arguments.split, arguments.num_stages
    check_num_stages(num_layers, num_stages)
    if split is not None:
        check_split(split, num_layers, num_stages)
        rule = "split must make a number of stages that is a multiple of the ranks"
        got = f"{list(split)}, {num_stages} stages for {arguments.num_ranks} ranks"
        require(num_stages % arguments.num_ranks == 0, rule, got)
    shape = arguments.shape
    if problem := arguments.schedule.error_at(shape):
        raise ValueError(problem)
    _check_options(arguments)
    arguments.schedule.with_warm_up(partial(find_warm_up, arguments.scheduler_fn))
    for name, compressor in arguments.compressors.items():
        rule = "an object such as Int8() or Cast(), or None"
        check_type(name, compressor, (Compressor, type(None)), rule)
        if compressor and (problem := compressor.error_at(AttachPoint.PIPELINE)):
            raise ValueError(f"{name}: {problem}")
    if problem := find_policy_error(arguments.nonfinite, ("raise", "skip")):
        raise ValueError(problem)
    if arguments.replicas is not None:
        trained = (p for layer in arguments.layers for p in layer.parameters() if p.requires_grad)
        dtypes = (each.dtype for each in trained)
        place = place_of_replicas(arguments.schedule, arguments.num_replicas, dtypes)
        raise_problem(arguments.replicas.error_at(place))


def _check_types(arguments: TrainerArguments) -> None:
    for index, layer in enumerate(arguments.layers):
        if (error := find_ddp_error(f"layers[{index}]", layer)) is not None:
            raise error
        fix = "pass plain layers, of which a rank keeps those of its stages alone"
        check_whole(f"layers[{index}]", layer, fix)
    if not has_methods(arguments.schedule, "step", "update_index", "versions", "error_at"):
        rule = "an object such as OneForwardOneBackward() or PipeOptim()"
        raise wrong_type("schedule", rule, arguments.schedule)
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
        if value is not None or not rule.endswith("or None"):
            check_callable(name, value, rule)
    if isinstance(arguments.loss_fn, type):
        raise wrong_type("loss_fn", functions[0][2], arguments.loss_fn)


def _check_options(arguments: TrainerArguments) -> None:
    schedule = arguments.schedule
    if (max_norm := arguments.max_norm) is not None:
        rule = "a number above 0, or None"
        if not is_number(max_norm):
            raise wrong_type("max_norm", rule, max_norm)
        require(max_norm > 0, f"max_norm must be {rule}", max_norm)
        fix = "clip a stage's own gradient in a hook of its optimizer (register_step_pre_hook)"
        _check_option(schedule, "max_norm", max_norm, fix)
    steps = arguments.gradient_accumulation_steps
    check_type("gradient_accumulation_steps", steps, int, "a positive integer")
    check_integer("gradient_accumulation_steps", steps)
    if steps > 1:
        fix = "take a schedule that flushes, or PipeDream2BW() with "
        fix += f"{steps} times the microbatches in a step"
        _check_option(schedule, "gradient_accumulation_steps", steps, fix, unset=1)
    if (scaler := arguments.grad_scaler) is not None:
        if not has_methods(scaler, "get_scale", "state_dict", "load_state_dict"):
            raise wrong_type("grad_scaler", "a torch.amp.GradScaler, or None", scaler)
        fix = "use bfloat16, or a schedule that flushes"
        _check_option(schedule, "grad_scaler", "a GradScaler", fix)
    if (correction := arguments.correction) is not None:
        if not has_methods(correction, "wrap"):
            rule = "an object such as UpdateErrorFeedback() or StageMomentum(), or None"
            raise wrong_type("correction", rule, correction)
        fix = "leave it out, or take a schedule that does not flush, such as PipeOptim()"
        _check_option(schedule, "correction", correction, fix)


def _check_option(
    schedule: Schedule, name: str, got: object, fix: str, unset: int | None = None
) -> None:
    if why := find_option_error(schedule, name):
        raise ValueError(
            f"{name} must be {unset} with {type(schedule).__name__}, {why}, got {got}: {fix}"
        )


def check_skips(
    schedule: Schedule,
    stages: Sequence[StageLayers],
    ties: Sequence[Tie],
    compressors: Mapping[str, Compressor | None],
) -> None:
    """Raise a ValueError if tied weights or skip connections do not fit the other arguments."""
    name = type(schedule).__name__
    skips = [skip for stage in stages for skip in stage.skips_out]
    if ties and (why := find_option_error(schedule, "tied weights")):
        raise ValueError(
            f"layers must not share parameters across stages with {name}, {why}, got {ties[0]}: "
            "move the split, or give each stage its own"
        )
    if skips and (why := find_option_error(schedule, "skip connections")):
        raise ValueError(
            f"layers must have no skip connections between stages with {name}, {why}, got "
            f"{skips[0]!r}: move the split"
        )
    for name, compressor in compressors.items() if ties and schedule.delays else ():
        rule = f"{name} must be None with a schedule that does not flush and tied weights, which "
        got = f"{ties[0]}: use a schedule that flushes, or move the split"
        require(compressor is None, f"{rule}travel with the activations", got)


def check_scalable(optimizers: Iterable[Optimizer]) -> None:
    """Raise a ValueError if a parameter is float16, in which gradients vanish without a scale."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
    why = "as gradients in float16 vanish without their scale"
    rule = f"layers must be float32 with grad_scaler, {why}"
    require(torch.float16 not in dtypes, rule, "torch.float16: use torch.autocast")


def check_memory(modules: Iterable[nn.Module]) -> None:
    """Raise a ValueError if a stage of this rank has a parameter on the meta device."""
    for module in modules:
        for name, parameter in module.named_parameters():
            rule = "layers must be in memory on the rank of their stage"
            got = f"{name} on the meta device: create the layer on this rank's device"
            require(not parameter.is_meta, rule, got)
