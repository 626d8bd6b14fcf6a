"""Pipeline parallelism: schedules as data, what they cost before they have run, and their trainer.

A schedule says in which order each rank works (``actions``) and on which weights (``versions``);
``simulate`` proves that the order can run, and measures it. ``PipelineTrainer`` runs it.
"""

from . import interlocking, prediction, runtime, schedules, simulation
from .interlocking import *  # noqa: F403 - each folder lists its public names itself
from .partition import SplitModel, split_model
from .prediction import *  # noqa: F403
from .runtime import *  # noqa: F403
from .schedules import *  # noqa: F403
from .simulation import *  # noqa: F403
from .trainer import PipelineTrainer

__all__ = ["PipelineTrainer", "SplitModel", "split_model"]
__all__ += interlocking.__all__
__all__ += prediction.__all__
__all__ += runtime.__all__
__all__ += schedules.__all__
__all__ += simulation.__all__
