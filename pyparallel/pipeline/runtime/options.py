"""How the stages of a trainer run, fixed before they are built."""

from dataclasses import dataclass

from .clipping import LossScale


@dataclass(frozen=True)
class StageOptions:
    """What the stages, the loss and the telemetry of a trainer are built with."""

    loss_scale: LossScale | None = None  # of the losses, which float16 needs; None: 1
    steps_per_update: int = 1  # an update takes the mean of the gradients of as many steps
    # Or the mean over the weights of all its steps, and of all replicas, known only at its end.
    weighs_update: bool = False
    # Each stage clips by the last norms that it knows. None: not, or all stages together.
    max_norm: float | None = None
    microbatches_per_update: int = 1  # with max_norm: the last one's gradients carry the norm
    # Whether losses are finite is left to Criterion.find_non_finite, as the host would wait for
    # each loss on a GPU. Schedules that do not flush need sends_found_inf for it.
    defers_check: bool = False
    # With its gradients a stage sends whether their loss is finite, and the optimizers skip the
    # update on the device, as they do with a GradScaler.
    sends_found_inf: bool = False
    measures_gradients: bool = False  # in a pass over them
