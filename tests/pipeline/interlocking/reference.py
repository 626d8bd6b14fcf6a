"""A reference of interlocking backpropagation: each loss through the whole graph by autograd."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def farthest(stage: int, num_stages: int, window: int) -> dict[int, float]:
    """Return the weights of the losses that a stage learns from."""
    return {min(stage + window - 1, num_stages - 1): 1.0}


def sum_of_window(stage: int, num_stages: int, window: int) -> dict[int, float]:
    return dict.fromkeys(range(stage, min(stage + window, num_stages)), 1.0)


def mean_of_window(stage: int, num_stages: int, window: int) -> dict[int, float]:
    origins = sum_of_window(stage, num_stages, window)
    return {origin: 1 / len(origins) for origin in origins}


@dataclass
class ReferenceTrainer:
    """A trainer of the modules of all stages and the heads of all but the last, in one process.

    Args:
        seed_of: seeds the generator before each stage's forward, by step and stage.
    """

    modules: Sequence[nn.Module]
    heads: Sequence[nn.Module]
    loss_fn: Callable[..., Tensor]
    optimizer_fn: Callable[..., torch.optim.Optimizer | list[torch.optim.Optimizer]]
    window: int
    rule: Callable[[int, int, int], dict[int, float]] = farthest
    head_loss_fn: Callable[..., Tensor] | None = None
    num_microbatches: int = 1
    seed_of: Callable[[int, int], int] | None = None

    def __post_init__(self):
        self.optimizers, self.num_steps = [], 0
        for stage in range(len(self.modules)):
            parameters = self._module_parameters(stage) + self._head_parameters(stage)
            made = self.optimizer_fn(parameters) if parameters else []
            self.optimizers += made if isinstance(made, list) else [made]

    def step(self, inputs: Tensor, target: Tensor) -> float:
        """Train all modules and heads on a batch; return its loss."""
        parts = (each.tensor_split(self.num_microbatches) for each in (inputs, target))
        total = 0.0
        for x, y in zip(*parts, strict=True):
            losses = [loss * (len(x) / len(inputs)) for loss in self.losses(x, y)]
            total += losses[-1].item()
            for stage in range(len(self.modules)):
                self._accumulate(stage, losses)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1
        return total

    def losses(self, inputs: Tensor, target: Tensor) -> list[Tensor]:
        """Return the losses of all stages, in one graph."""
        value, losses = inputs, []
        for stage, module in enumerate(self.modules):
            if self.seed_of is not None:
                torch.manual_seed(self.seed_of(self.num_steps, stage))
            value = module(value)
            if stage == len(self.heads):
                losses.append(self.loss_fn(value, target))
            else:
                loss_fn = self.head_loss_fn or self.loss_fn
                losses.append(loss_fn(self.heads[stage](value), target))
        return losses

    def state(self) -> dict[str, list[Tensor]]:
        """Return the state of all modules and heads."""
        named = {f"{s}.module": m for s, m in enumerate(self.modules)}
        named |= {f"{s}.head": m for s, m in enumerate(self.heads)}
        return {name: list(m.state_dict().values()) for name, m in named.items()}

    def _accumulate(self, stage: int, losses: list[Tensor]) -> None:
        for origin, weight in self.rule(stage, len(self.modules), self.window).items():
            _add(self._module_parameters(stage), weight * losses[origin])
        if stage < len(self.heads):
            _add(self._head_parameters(stage), losses[stage])

    def _module_parameters(self, stage: int) -> list[nn.Parameter]:
        return [p for p in self.modules[stage].parameters() if p.requires_grad]

    def _head_parameters(self, stage: int) -> list[nn.Parameter]:
        return list(self.heads[stage].parameters()) if stage < len(self.heads) else []


def _add(parameters: list[nn.Parameter], loss: Tensor) -> None:
    if not parameters or not loss.requires_grad:
        return
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    for parameter, gradient in zip(parameters, grads, strict=True):
        if gradient is not None:
            before = 0 if parameter.grad is None else parameter.grad
            parameter.grad = before + gradient
