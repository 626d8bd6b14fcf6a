"""BatchNorm's running statistics for the full model, after its units were trained apart."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comm import Collectives, Run
from ..training.arguments import require


@torch.no_grad()
def recalibrate(
    module: nn.Module, batches: Iterable[Any], process_group: dist.ProcessGroup | None = None
) -> None:
    """Recompute BatchNorm's running statistics over all batches of all ranks.

    The mean and the unbiased variance of all inputs replace the running statistics; meanwhile other
    modules run in eval mode. Call it inside ``SubnetTrainer.full_model()``, before evaluation::

        with trainer.full_model() as module:
            recalibrate(module, (inputs for inputs, _ in batches))
            evaluate(module)

    Args:
        module: the same on all ranks, which call this together; without BatchNorm it is unchanged.
        batches: inputs of the module, each a tensor or a tuple of arguments; ranks may have
            different numbers of them, including none.
        process_group: None means the default group, or a single rank if none was initialized.

    Fewer than two values per unit over all ranks are a ValueError on all.
    """
    norms = [
        m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None
    ]
    if not norms:
        return
    moments = [_Moments(norm) for norm in norms]
    with _training_mode_of(module, norms), _record_moments(norms, moments):
        for batch in batches:
            module(*batch) if isinstance(batch, tuple) else module(batch)
    collectives = Collectives(Run(process_group))
    for norm, moment in zip(norms, moments, strict=True):
        collectives.all_reduce_(moment.sums)
        moment.write_into(norm)


class _Moments:
    """Count, sums and sums of squares of a norm's inputs per unit, (3, num_features) float64."""

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
        rule = "batches must have at least two values per unit over all ranks"
        require(float(count[0]) >= 2, rule, int(count[0]))
        mean = total / count
        variance = (squares / count - mean.square()).clamp_(min=0) * count / (count - 1)
        for running, measured in ((norm.running_mean, mean), (norm.running_var, variance)):
            assert running is not None
            running.copy_(measured)


@contextmanager
def _record_moments(norms: list[_BatchNorm], moments: list[_Moments]) -> Iterator[None]:
    handles = [n.register_forward_pre_hook(m) for n, m in zip(norms, moments, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _training_mode_of(module: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    before = [(each, each.training) for each in module.modules()]
    module.eval()
    for norm in norms:
        norm.train()
    try:
        yield
    finally:
        for each, was_training in before:
            each.training = was_training
