"""Running statistics of the whole model, of which every unit has seen only a part in training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .collectives import SubnetCollectives


@torch.no_grad()
def recalibrate(
    module: nn.Module, batches: Iterable[Any], process_group: dist.ProcessGroup | None = None
) -> None:
    """Measure BatchNorm's running statistics anew, over all batches of all ranks together.

    A BatchNorm takes its own batch's statistics meanwhile, as in training, and all other modules
    run as at test time. The mean and the unbiased variance of everything that comes in take the
    place of the running ones. Inside ``SubnetTrainer.full_model()``, before evaluation::

        with trainer.assembled() as module:
            recalibrate(module, (inputs for inputs, _ in batches))
            evaluate(module)

    Args:
        module: the same on all ranks, which call this together; one without BatchNorm is left as
            it is.
        batches: inputs of the module, a tensor or a tuple of arguments each; ranks may have
            different numbers of them, and a rank none.
        process_group: None means the default group, or no group if none was made.

    Raises:
        ValueError: on all ranks: fewer than two values for a unit, or none at all.
    """
    norms = [
        m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None
    ]
    if not norms:
        return
    moments = [_Moments(norm) for norm in norms]
    with _only_training(module, norms), _watching(norms, moments):
        for batch in batches:
            module(*batch) if isinstance(batch, tuple) else module(batch)
    members = SubnetCollectives(process_group, moments[0].sums.device)
    for norm, moment in zip(norms, moments, strict=True):
        members.sum_(moment.sums)
        moment.write_into(norm)


class _Moments:
    """Count, sums and sums of squares of what comes into a norm, in float64."""

    def __init__(self, norm: _BatchNorm) -> None:
        mean: Any = norm.running_mean
        self.sums = torch.zeros(3, norm.num_features, dtype=torch.float64, device=mean.device)

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].double()
        others = [dim for dim in range(x.dim()) if dim != 1]
        self.sums[0] += x.numel() // x.shape[1]
        self.sums[1] += x.sum(others)
        self.sums[2] += x.square().sum(others)

    def write_into(self, norm: _BatchNorm) -> None:
        count, total, squares = self.sums
        if float(count[0]) < 2:
            raise ValueError(
                "batches must bring at least two values for each unit to all ranks together, got "
                f"{int(count[0])}"
            )
        mean = total / count
        variance = (squares / count - mean.square()).clamp_(min=0) * count / (count - 1)
        for running, measured in ((norm.running_mean, mean), (norm.running_var, variance)):
            assert running is not None
            running.copy_(measured)


@contextmanager
def _watching(norms: list[_BatchNorm], moments: list[_Moments]) -> Iterator[None]:
    handles = [n.register_forward_pre_hook(m) for n, m in zip(norms, moments, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _only_training(module: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    before = [(each, each.training) for each in module.modules()]
    module.eval()
    for norm in norms:
        norm.train()
    try:
        yield
    finally:
        for each, was_training in before:
            each.training = was_training
