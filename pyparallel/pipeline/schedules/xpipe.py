"""The XPipe schedule: one weight prediction for all microbatches of a step."""

from dataclasses import dataclass

from .pipeoptim import PipeOptim


@dataclass(frozen=True, repr=False)
class XPipe(PipeOptim):
    """``PipeOptim`` with one update per step, for which its first microbatch predicts the weights.

    Guan et al., arXiv 1911.04610. The horizon is the true version difference between that
    microbatch's forward and the update with the step's gradients. Arguments are ``PipeOptim``'s.
    """

    updates_once_per_step = True
