"""The ways to train a language model on many ranks, behind one interface: `Training`."""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyparallel import SGP, GossipDataParallel, PipelineTrainer
from pyparallel.compression import ErrorFeedback, PowerSGD, compress_ddp
from pyparallel.gossip import DiLoCo, GossipState
from pyparallel.pipeline import PipeOptim, split_model
from recipe import Recipe


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross-entropy of each token but the first of a window, in nats."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make_optimizer(recipe: Recipe, parameters: Any) -> AdamW:
    return AdamW(parameters, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.1)


def make_scheduler(recipe: Recipe, optimizer: Optimizer, updates_per_step: int = 1) -> LambdaLR:
    """Let the learning rate rise, then fall to a tenth along a cosine."""
    updates = recipe.steps * updates_per_step

    def factor(update: int) -> float:
        rising = (update + 1) / (recipe.warm_up * updates)
        return min(rising, 0.55 + 0.45 * math.cos(math.pi * min(1, update / updates)))

    return LambdaLR(optimizer, factor)


class DataParallel:
    """The plain loop, around a whole model on every rank."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.optimizer = make_optimizer(recipe, model.parameters())
        self.wrapped: Any = self.wrap(model, recipe)
        self.scheduler = make_scheduler(recipe, self.optimizer)
        self.replica = dist.get_rank()  # which of the batches of a step is this rank's

    def step(self, ids: Tensor) -> float:
        """Train on a batch; return its loss."""
        loss = next_token_loss(self.wrapped(ids, use_cache=False).logits, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(self.wrapped.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()


class DDP(DataParallel):
    """All ranks average their gradients."""

    def wrap(self, model: nn.Module, recipe: Recipe) -> nn.Module:
        self.steps = 0
        return DistributedDataParallel(model)

    def step(self, ids: Tensor) -> float:
        self.steps += 1
        return super().step(ids)

    def metrics(self) -> dict[str, float]:
        """Return the bytes of a ring all-reduce, which DDP does not count."""
        numel = sum(each.numel() for each in self.wrapped.parameters())
        bytes_of_step = 8 * (1 - 1 / dist.get_world_size()) * numel
        return {"rank/bytes_sent": self.steps * bytes_of_step, "rank/steps": self.steps}

    def whole_state(self) -> dict[str, Tensor]:
        return self.wrapped.module.state_dict()

    def state_dict(self) -> dict[str, Any]:
        parts = self.wrapped.module, self.optimizer, self.scheduler
        return {"parts": [each.state_dict() for each in parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = self.wrapped.module, self.optimizer, self.scheduler
        for each, saved in zip(parts, state["parts"], strict=True):
            each.load_state_dict(saved)


class CompressedDDP(DDP):
    """The same, but what travels is two narrow factors of each matrix of a gradient."""

    def wrap(self, model: nn.Module, recipe: Recipe) -> nn.Module:
        ddp = super().wrap(model, recipe)
        compressor = ErrorFeedback(PowerSGD(rank=recipe.compression_rank))
        self.compression = compress_ddp(ddp, compressor)
        return ddp

    def metrics(self) -> dict[str, float]:
        return self.compression.metrics()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"compression": self.compression.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.compression.load_state_dict(state["compression"])


class Gossip(DataParallel):
    """Each rank averages its weights with one other rank, while the next step computes."""

    def algorithm(self, recipe: Recipe) -> Any:
        return SGP(overlap=1)

    def wrap(self, model: nn.Module, recipe: Recipe) -> nn.Module:
        wrapped = GossipDataParallel(model, self.optimizer, self.algorithm(recipe))
        self.state = GossipState(wrapped, self.optimizer)
        return wrapped

    def metrics(self) -> dict[str, float]:
        return self.wrapped.metrics()

    def whole_state(self) -> dict[str, Tensor]:
        return self.wrapped.full_state_dict()

    def state_dict(self) -> dict[str, Any]:
        return {"gossip": self.state.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state["gossip"])
        self.scheduler.load_state_dict(state["scheduler"])


class OuterSteps(Gossip):
    """Local steps, then one outer step of all ranks."""

    def algorithm(self, recipe: Recipe) -> Any:
        return DiLoCo(interval=recipe.interval)


class Pipeline:
    """Each rank holds a stage, and updates it for every microbatch."""

    def __init__(self, model: nn.Module, recipe: Recipe, mesh: Any = None, how: Any = None) -> None:
        layers = split_model(model)
        stages = dist.get_world_size() if mesh is None else mesh["stage"].size()
        stages = max(2, stages)  # one rank may hold both
        self.replica = 0 if mesh is None else mesh.get_local_rank("replicate")
        self.trainer = PipelineTrainer(
            layers,
            next_token_loss,
            partial(make_optimizer, recipe),
            PipeOptim(synchronous_updates="warm-up"),
            num_microbatches=recipe.microbatches,
            num_stages=stages,
            # Without a split, measured times decide which layers a rank holds.
            split=[stage * len(layers) // stages for stage in range(1, stages)],
            scheduler_fn=lambda each: make_scheduler(recipe, each, recipe.microbatches),
            max_norm=1.0,
            mesh=mesh,
            replicas=how,
        )
        self.metrics = self.trainer.metrics
        self.load_state_dict = self.trainer.load_state_dict

    def step(self, ids: Tensor) -> float | None:
        """Train on a batch; return its loss on the rank of the last stage."""
        loss = self.trainer.step(ids, target=ids)
        return loss if self.trainer.stages[-1].index == len(self.trainer.split) else None

    def whole_state(self) -> dict[str, Tensor]:
        with self.trainer.consensus():  # of all replicas; microbatches in flight come first
            return self.trainer.full_state_dict()

    def state_dict(self) -> dict[str, Any]:
        self.trainer.flush()
        return self.trainer.state_dict()


def build_mesh(model: nn.Module, recipe: Recipe) -> Pipeline:
    """Return replicas of a pipeline, whose stages gossip."""
    size, device = dist.get_world_size(), next(model.parameters()).device.type
    if size % recipe.replicas:
        sys.exit(f"the ranks must be a multiple of {recipe.replicas} replicas, got {size}")
    shape = recipe.replicas, size // recipe.replicas
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "stage"))
    return Pipeline(model, recipe, mesh, SGP(overlap=recipe.microbatches))  # a round a step


METHODS: dict[str, Callable[[nn.Module, Recipe], Any]] = {
    "ddp": DDP,
    "compressed": CompressedDDP,
    "gossip": Gossip,
    "diloco": OuterSteps,
    "pipeline": Pipeline,
    "mesh": build_mesh,
}
