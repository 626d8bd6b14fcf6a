"""Jobs of PipelineTrainer: every schedule, predicted optimizers, heads, a codec."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel import PipelineTrainer
from pyparallel.compression import Int8, TopK
from pyparallel.pipeline import (
    ConvHead,
    GPipe,
    Interleaved,
    Interlocking,
    LinearHead,
    Mean,
    Nesterov,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipeMare,
    PipeOptim,
    PooledHead,
    Rollout,
    SpecTrain,
    Sum,
    TiedHead,
    XPipe,
    ZeroBubble,
)
from tests.golden.job import Job, Result, listed
from tests.golden.models import (
    WIDTH,
    Linear,
    Scale,
    adam,
    adamw,
    batch,
    numbers,
    plain_sgd,
    sgd,
    squared_error,
)

nesterov = partial(torch.optim.SGD, lr=0.03125, momentum=0.75, nesterov=True)
rmsprop = partial(torch.optim.RMSprop, lr=0.0625, eps=0.125, centered=True)
small_steps = partial(torch.optim.SGD, lr=0.03125, momentum=0.5, weight_decay=0.125)


NUM_RANKS = 2
SAMPLES = 2
# Keys that pyparallel adds to an optimizer's state.
ADDED = ("last_gradient", "average_change", "updates")

Batch = tuple[Tensor, Tensor]


class PipelineRun:
    """A training loop with PipelineTrainer.

    Args:
        make: builds the trainer from its layers.
        layers: of all stages; each rank trains its own.
        next_batch: returns the batch of a step.
        is_prepared: whether stages are built for a batch before a state can be loaded.
    """

    def __init__(
        self,
        make: Callable[[list[nn.Module]], PipelineTrainer],
        layers: list[nn.Module],
        next_batch: Callable[[int], Batch],
        *,
        is_prepared: bool = False,
    ) -> None:
        self.layers = nn.ModuleList(layers)
        self.trainer = make(layers)
        self.batch = next_batch
        if is_prepared:
            self.trainer.prepare(*next_batch(0))
        self.losses: list[float] = []
        self.head_losses: list[float] = []

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            loss = self.trainer.step(*self.batch(step))
            self.losses += [] if loss is None else [loss]
            heads = [stage.head_loss for stage in self.trainer.stages]
            self.head_losses += [each for each in heads if each is not None]

    def pause(self) -> None:
        self.trainer.flush()

    def save(self) -> Any:
        return {"trainer": self.trainer.state_dict(), "layers": self.layers.state_dict()}

    def load(self, saved: Any, way: int) -> None:
        self.trainer.load_state_dict(saved["trainer"])

    def load_others(self, saved: Any) -> None:
        """Load the layers, and torch's own part of optimizer states that pyparallel adds to."""
        state = copy.deepcopy(saved["trainer"])
        if any(_strip(stage["optimizer"]) for stage in state.values()):
            self.trainer.load_state_dict(state)
        else:
            self.layers.load_state_dict(saved["layers"])

    def finish(self) -> Result:
        self.trainer.flush()
        found = {"losses": self.losses, "head losses": self.head_losses}
        return found | listed(self.layers.state_dict())


def _strip(optimizer: dict[str, Any] | None) -> bool:
    """Remove pyparallel's part; return whether there was one, or None without an optimizer."""
    if optimizer is None:
        return False
    places = [*optimizer["param_groups"], *optimizer["state"].values()]
    gone = [place.pop(name, None) for place in places for name in ADDED]
    return any(each is not None for each in gone)


def _four_stages() -> list[nn.Module]:
    return [
        Scale("0"),
        nn.Sequential(nn.LeakyReLU(0.25), Linear(WIDTH, WIDTH, name="1")),
        nn.Sequential(nn.LeakyReLU(0.25), Scale("2")),
        nn.Sequential(nn.LeakyReLU(0.25), Scale("3")),
    ]


def _batch(step: int) -> Batch:
    return batch(step, SAMPLES, rank=0)


def _job(schedule: Any, optimizer_fn: Callable[[Any], Any] = sgd, **options: Any) -> Job:
    def make(layers: list[nn.Module]) -> PipelineTrainer:
        return PipelineTrainer(
            layers,
            squared_error,
            optimizer_fn,
            schedule,
            num_microbatches=SAMPLES,
            split=(1, 2, 3),
            **options,
        )

    takes_roots = optimizer_fn not in (sgd, plain_sgd, small_steps, nesterov)
    exact = not takes_roots and "max_norm" not in options
    return Job(lambda: PipelineRun(make, _four_stages(), _batch), exact=exact)


def _interlocking(
    window: int,
    heads: Callable[[list[nn.Module]], Any],
    *,
    layers_fn: Callable[[], list[nn.Module]] = _four_stages,
    next_batch: Callable[[int], Batch] = _batch,
    exact: bool = True,
    num_stages: int = NUM_RANKS,
    **options: Any,
) -> Job:
    def make(layers: list[nn.Module]) -> PipelineTrainer:
        torch.manual_seed(7)  # initial heads, which loading replaces
        alone = [dist.new_group([rank]) for rank in range(NUM_RANKS)][dist.get_rank()]
        return PipelineTrainer(
            layers,
            squared_error,
            sgd,
            Interlocking(window, heads(layers), **options),
            num_microbatches=SAMPLES,
            split={2: (len(layers) // 2,), 4: (1, 2, 3)}[num_stages],
            process_group=None if num_stages == NUM_RANKS else alone,
        )

    return Job(lambda: PipelineRun(make, layers_fn(), next_batch, is_prepared=True), exact=exact)


def _images() -> list[nn.Module]:
    return [_Image(), nn.Flatten(1)]


class _Image(nn.Module):
    """Reshape (batch, 3) to (batch, 1, 1, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale("image")

    def forward(self, value: Tensor) -> Tensor:
        return self.scale(value)[:, None, None, :]


def _words() -> list[nn.Module]:
    embedding = nn.Embedding(WIDTH, WIDTH)
    with torch.no_grad():
        embedding.weight.copy_(numbers((WIDTH, WIDTH), "embedding"))
    return [embedding, Scale("words")]


def _tokens(step: int) -> Batch:
    tokens = (8 * numbers((SAMPLES,), "tokens", step)).long() % WIDTH
    return tokens, numbers((SAMPLES, WIDTH), "token targets", step)


def nadam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(
        parameters, lr=0.03125, betas=(0.75, 0.875), weight_decay=0.125, decoupled_weight_decay=True
    )


DECAYING = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)

JOBS = {
    "gpipe": _job(GPipe()),
    "1f1b": _job(OneForwardOneBackward(), adamw),
    "1f1b-scheduler": _job(OneForwardOneBackward(), plain_sgd, scheduler_fn=DECAYING),
    "1f1b-clipped": _job(OneForwardOneBackward(), max_norm=0.5),
    "interleaved": _job(Interleaved()),
    "zero-bubble": _job(ZeroBubble()),
    "pipedream": _job(PipeDream(), small_steps),
    "2bw": _job(PipeDream2BW(), small_steps),
    "spectrain-1": _job(SpecTrain(variant=1), small_steps),
    "spectrain-2": _job(SpecTrain(variant=2), plain_sgd),
    "xpipe": _job(XPipe("live"), adam),
    "xpipe-consistent": _job(XPipe("consistent", Rollout(0.5)), small_steps),
    "pipeoptim": _job(PipeOptim(), small_steps),
    "pipeoptim-adamw": _job(PipeOptim(), adamw),
    "pipeoptim-plain": _job(PipeOptim(), plain_sgd),
    "pipeoptim-rmsprop": _job(PipeOptim("consistent"), rmsprop),
    "pipeoptim-rollout": _job(PipeOptim("consistent", Rollout(0.5)), small_steps),
    "pipeoptim-scheduler": _job(PipeOptim(), small_steps, scheduler_fn=DECAYING),
    "pipeoptim-int8": _job(
        PipeOptim(), small_steps, compress_activations=Int8(seed=1), compress_gradients=TopK(0.75)
    ),
    "pipemare": _job(PipeMare(), small_steps),
    "pipemare-annealing": _job(PipeMare(annealing=10), small_steps),
    "pipemare-decay": _job(PipeMare(decay=0.25), small_steps),
    "pipemare-both": _job(PipeMare(annealing=10, decay=0.25), adamw),
    "nesterov": _job(Nesterov("consistent"), nesterov),
    "nesterov-nadam": _job(Nesterov("live"), nadam),
    "interlocking-1": _interlocking(1, lambda layers: [Scale("head")]),
    "interlocking-2": _interlocking(2, lambda layers: [Scale("head")], losses=Sum()),
    "interlocking-alone": _interlocking(
        2, lambda layers: [Scale(f"head {i}") for i in range(3)], num_stages=4, losses=Mean()
    ),
    "linear-head": _interlocking(1, lambda layers: LinearHead(WIDTH), exact=False),
    "linear-head-norm": _interlocking(
        1, lambda layers: LinearHead(WIDTH, nn.LayerNorm), exact=False
    ),
    "pooled-head": _interlocking(
        1, lambda layers: PooledHead(WIDTH, dim=-1), layers_fn=_images, exact=False
    ),
    "conv-head": _interlocking(
        1, lambda layers: ConvHead(WIDTH, (2,)), layers_fn=_images, exact=False
    ),
    "tied-head": _interlocking(
        1, lambda layers: TiedHead(layers[0]), layers_fn=_words, next_batch=_tokens, exact=False
    ),
}

# The same, saved with checksums.
OF_FORMAT_2 = ["1f1b-scheduler", "pipeoptim-adamw", "interlocking-1"]
JOBS |= {f"format-2-{name}": JOBS[name] for name in OF_FORMAT_2}
