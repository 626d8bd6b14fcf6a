"""Pipeline parallelism: schedules as data, and their trainer.

A schedule says in which order each rank works (``actions``) and on which weights (``versions``);
``PipelineTrainer`` runs it; ``pyparallel.planning.pipelines`` simulates it.
"""

from . import interlocking, prediction, runtime, schedules
from .interlocking import *  # noqa: F403 - each folder lists its public names itself
from .partition import ModelParts, SplitModel, split_model
from .prediction import *  # noqa: F403
from .runtime import *  # noqa: F403
from .schedules import *  # noqa: F403
from .trainer import PipelineTrainer

__all__ = ["ModelParts", "PipelineTrainer", "SplitModel", "split_model"]
__all__ += interlocking.__all__
__all__ += prediction.__all__
__all__ += runtime.__all__
__all__ += schedules.__all__
