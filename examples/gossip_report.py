"""Measurements of train_gossip.py, which rank 0 prints, draws and saves."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks_report import gather, print_table, smooth


@dataclass
class History:
    """Losses and seconds of this rank's steps, and consensus distances with their step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    distances: list[tuple[int, float]] = field(default_factory=list)
    wall_seconds: float = 0.0
    started: float | None = None

    def begin_step(self) -> float:
        now = time.perf_counter()
        self.started = self.started or now
        return now

    def end_step(self, begin: float, loss: Tensor) -> None:
        self.losses.append(loss.item())
        now = time.perf_counter()
        self.seconds.append(now - begin)
        self.wall_seconds = now - self.started

    def record_distance(self, model) -> None:
        self.distances.append((len(self.losses), model.consensus_distance()))


class Task(Protocol):
    """Data, a model and the loop that trains it."""

    measure: str

    def score(self, model: nn.Module) -> float:
        """Return the model's score on held-out data."""

    def show(self, score: float) -> str:
        """Format the score for the table."""

    def extra_rows(self, history: History) -> list[tuple[str, str]]:
        """Return more rows of the table."""


def report(model, task: Task, history: History, seed: int, out: Path) -> None:
    """Measure the ranks and their consensus; rank 0 prints, draws and saves."""
    own = task.score(model.module)
    with model.consensus() as averaged:
        consensus = task.score(averaged)
        weights = {name: tensor.clone() for name, tensor in averaged.state_dict().items()}
    distance = model.consensus_distance()
    scores, histories = gather(own), gather(history)
    step_bytes = model.bytes_sent / len(history.losses)
    if dist.get_rank() != 0:
        return
    seconds = sorted(history.seconds)[len(history.seconds) // 2]
    title = f"{model.algorithm}, {dist.get_world_size()} ranks, seed {seed}"
    rows = [
        (f"{task.measure}, consensus", task.show(consensus)),
        *((f"{task.measure}, rank {rank}", task.show(score)) for rank, score in enumerate(scores)),
        ("consensus distance", f"{distance:.3g}"),
        ("steps per rank", f"{len(history.losses)}"),
        ("seconds per step, median", f"{seconds:.4f}"),
        ("bytes sent per step and rank", f"{step_bytes:,.0f}"),
        *task.extra_rows(history),
    ]
    print_table(title, rows)
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "gossip.png", title, histories)
    torch.save(weights, out / "gossip.pt")
    results = {
        "algorithm": repr(model.algorithm),
        "num_ranks": dist.get_world_size(),
        "seed": seed,
        "num_steps": len(history.losses),
        "measure": task.measure,
        "score": consensus,
        "scores_of_ranks": scores,
        "consensus_distance": distance,
        "step_bytes": step_bytes,
        "step_seconds": seconds,
        "losses_of_ranks": [each.losses for each in histories],
    }
    (out / "results.json").write_text(json.dumps(results))
    print(f"\npicture: {out / 'gossip.png'}\ncheckpoint: {out / 'gossip.pt'}")


def draw(path: Path, title: str, histories: list[History]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for rank, history in enumerate(histories):
        left.plot(smooth(history.losses), label=f"rank {rank}", linewidth=1)
    left.set(xlabel="step", ylabel="training loss (mean of 10 steps)", yscale="log")
    left.legend()
    right.plot(*zip(*histories[0].distances, strict=True), color="black")
    right.set(xlabel="step", ylabel="consensus distance (RMS over ranks)", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
