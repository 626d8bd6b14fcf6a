"""How the stages of a trainer run, fixed before they are built."""

from dataclasses import dataclass

from .clipping import LossScale


@dataclass(frozen=True)
class StageOptions:
    """What the stages, the loss and the telemetry of a trainer are built with.

    Args:
        loss_scale: of the losses, which float16 needs; None: 1.
        steps_per_update: an update takes the mean of the gradients of as many steps.
        max_norm: each stage clips its updates by the last norms that it knows. None: they are not
            clipped, or all stages' together.
        microbatches_per_update: with ``max_norm``: the last one's gradients carry the norm.
        defers_check: whether losses are finite is left to ``Criterion.find_non_finite``, as the
            host would wait for each loss on a GPU. With schedules that do not flush, which update
            in between, only with ``sends_found_inf``.
        sends_found_inf: with its gradients a stage sends whether their loss is finite, and the
            optimizers skip the update on the device, as they do with a ``GradScaler``.
        measures_gradients: compute the norm of each update's gradient, in a pass over it.
    """

    loss_scale: LossScale | None = None
    steps_per_update: int = 1
    max_norm: float | None = None
    microbatches_per_update: int = 1
    defers_check: bool = False
    sends_found_inf: bool = False
    measures_gradients: bool = False
