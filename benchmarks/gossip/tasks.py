"""Data that is divided among the ranks, a model, and its training with a gossip algorithm."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from benchmarks.harness.learning_rate import decayed
from benchmarks.harness.rows import Row
from examples.data import as_tensor, cut_windows, draw_windows, load_digits, load_files
from examples.models import accuracy, build_transformer, byte_loss, digits_net
from pyparallel import GossipDataParallel
from pyparallel.gossip import Algorithm


class Task:
    """A training task, which keeps the losses and seconds of this rank's steps.

    ``build()`` returns a model, initialized from torch's global generator, and its optimizer,
    ``train(model, optimizer)`` trains on this rank's data, ``score(module)`` is on held-out data.
    """

    measure: str

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(
        self,
        model: GossipDataParallel,
        optimizer: Optimizer,
        loss_of: Callable[[], Tensor],
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        model.record_loss(loss)  # only LeaderSGD needs it
        before_step()
        optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begin)


class Digits(Task):
    """scikit-learn's digits; SGD with momentum and a cosine learning rate by epoch."""

    measure = "test accuracy"
    warm_up = 0
    """Number of epochs in which the rate grows linearly, from its share of one rank."""

    def __init__(self, seed: int, steps: int | None) -> None:
        super().__init__()
        images, labels, *self.test = load_digits()
        ranks = slice(dist.get_rank(), None, dist.get_world_size())  # parts may differ by one
        self.images, self.labels = images[ranks], labels[ranks]
        steps_per_epoch = -(-len(self.labels) // 16)
        self.epochs = -(-steps // steps_per_epoch) if steps else 40
        self.max_steps = steps or self.epochs * steps_per_epoch
        self.seed = seed

    def build(self) -> tuple[nn.Module, Optimizer]:
        model = digits_net()
        optimizer = torch.optim.SGD(
            model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        return model, optimizer

    def train(self, model: GossipDataParallel, optimizer: Optimizer) -> None:
        shuffle = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        scheduler: LRScheduler = CosineAnnealingLR(optimizer, self.epochs - self.warm_up)
        if self.warm_up:
            grow = LinearLR(optimizer, 1 / dist.get_world_size(), total_iters=self.warm_up)
            scheduler = SequentialLR(optimizer, [grow, scheduler], [self.warm_up])
        for _ in range(self.epochs):
            order = torch.randperm(len(self.labels), generator=shuffle)
            batches = order.split(16)[: self.max_steps - len(self.losses)]
            with model.join():  # ranks may have unequal numbers of batches
                for batch in batches:
                    images, labels = self.images[batch], self.labels[batch]
                    self.step(
                        model, optimizer, lambda x=images, y=labels: cross_entropy(model(x), y)
                    )
            scheduler.step()

    def score(self, module: nn.Module) -> float:
        return accuracy(module, *self.test)


class Text(Task):
    """Python's standard library; a small transformer, AdamW, warm-up, cosine decay, clipping."""

    measure = "held-out bits per byte"

    def __init__(self, seed: int, steps: int | None) -> None:
        super().__init__()
        files, others = load_files()
        self.mine = as_tensor(files[dist.get_rank() :: dist.get_world_size()])
        self.windows = cut_windows(as_tensor(others), 512, 129)
        self.steps = steps or 3000
        self.seed = seed

    def build(self) -> tuple[nn.Module, Optimizer]:
        model = build_transformer(128, width=32, num_layers=1, num_heads=2)
        optimizer = torch.optim.AdamW(
            model.parameters(), 2.4e-2, betas=(0.5, 0.99), weight_decay=0.1
        )
        return model, optimizer

    def train(self, model: GossipDataParallel, optimizer: Optimizer) -> None:
        draw = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        scheduler = decayed(optimizer, self.steps)

        def loss_of() -> Tensor:
            windows = draw_windows(self.mine, 4, 129, draw)
            return byte_loss(model(windows[:, :-1]), windows[:, 1:])

        def clip() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        for _ in range(self.steps):
            self.step(model, optimizer, loss_of, clip)
            scheduler.step()

    @torch.no_grad()
    def score(self, module: nn.Module) -> float:
        losses = [byte_loss(module(part[:, :-1]), part[:, 1:]) for part in self.windows.split(32)]
        return float(torch.stack(losses).mean()) / math.log(2)


TASKS = {"digits": Digits, "text": Text}


def train(
    task: Task, make_algorithm: Callable[[], Algorithm], rate: float = 1.0, **options: Any
) -> Row:
    """Train on this rank at a factor of the task's own learning rate; return what it found.

    The algorithm is made once the model has been built.
    """
    module, optimizer = task.build()
    for group in optimizer.param_groups:
        group["lr"] *= rate
    model = GossipDataParallel(module, optimizer, make_algorithm(), **options)
    task.train(model, optimizer)
    score_of_rank = task.score(model.module)
    with model.consensus() as averaged:
        score = task.score(averaged)
    return {
        "options": repr(model.algorithm),
        "measure": task.measure,
        "score": score,
        "score_of_rank": score_of_rank,
        "consensus_distance": model.consensus_distance(),
        "step_bytes": model.bytes_sent / len(task.losses),
        "step_seconds": statistics.median_high(task.seconds),
        "losses": task.losses,
    }


def columns_of(data: str, ranks: Sequence[Row]) -> Row:
    first, scores = ranks[0], [rank["score_of_rank"] for rank in ranks]
    return {
        "options": first["options"],
        "steps": str(len(first["losses"])),
        "measure": first["measure"],
        "score": f"{first['score']:.5f}",
        "worst_rank": f"{(min if data == 'digits' else max)(scores):.5f}",
        "consensus_distance": f"{first['consensus_distance']:.3g}",
        "step_bytes": f"{first['step_bytes']:.0f}",
    }
