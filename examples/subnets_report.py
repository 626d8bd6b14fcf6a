"""Measurements of train_subnets.py, and how rank 0 prints, draws and saves them."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.subnets import SubnetTrainer
from ranks_report import gather, print_table, smooth


@dataclass
class History:
    """This rank's measurements per step, and the scores with their step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)

    @property
    def wall_seconds(self) -> float:
        """Total seconds of all steps, including merges."""
        return sum(self.seconds)

    def begin_step(self) -> float:
        return time.perf_counter()

    def end_step(self, begin: float, loss: Tensor) -> None:
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begin)

    def note_score(self, score: float) -> None:
        self.scores.append((len(self.losses), score))


class Task(Protocol):
    """Data, model, partition and training loop."""

    measure: str

    def score(self, module: nn.Module) -> float:
        """Return the full model's score on held-out data; all ranks call it together."""

    def show(self, score: float) -> str:
        """Format the score for the table."""

    def extra_rows(self, history: History) -> list[tuple[str, str]]:
        """Return additional rows of the table."""


def report(
    trainer: SubnetTrainer, task: Task, history: History, interval: int, seed: int, out: Path
) -> None:
    """Gather the ranks' results; rank 0 prints, draws and saves."""
    step_bytes = trainer.bytes_sent / len(history.losses)
    with trainer.full_model() as module:
        score = task.score(module)
        weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        whole = count(module)
    parts, histories = gather(count(trainer.subnet)), gather(history)
    if dist.get_rank() != 0:
        return
    num_ranks = dist.get_world_size()
    seconds = sorted(history.seconds)[len(history.seconds) // 2]
    dense_bytes = 2 * 4 * whole * (num_ranks - 1) / num_ranks  # fp32, ring all-reduce
    title = f"Subnets, {num_ranks} ranks, interval {interval}, seed {seed}"
    rows = [
        (f"{task.measure}, all subnets together", task.show(score)),
        ("weights of the full model", f"{whole:,}"),
        *((f"weights of subnet {rank}", f"{part:,}") for rank, part in enumerate(parts)),
        ("steps per rank", f"{len(history.losses)}"),
        ("merges", f"{trainer.round_index}"),
        ("seconds per step, median", f"{seconds:.4f}"),
        ("bytes sent per step and rank", f"{step_bytes:,.0f}; all-reduce: {dense_bytes:,.0f}"),
        *task.extra_rows(history),
    ]
    print_table(title, rows)
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "subnets.png", title, histories, task.measure)
    torch.save(weights, out / "subnets.pt")
    results = {
        "num_ranks": num_ranks,
        "interval": interval,
        "seed": seed,
        "num_steps": len(history.losses),
        "measure": task.measure,
        "score": score,
        "scores": history.scores,
        "weights_of_whole": whole,
        "weights_of_subnets": parts,
        "step_bytes": step_bytes,
        "step_seconds": seconds,
        "losses_of_ranks": [each.losses for each in histories],
    }
    (out / "results.json").write_text(json.dumps(results))
    print(f"\npicture: {out / 'subnets.png'}\ncheckpoint: {out / 'subnets.pt'}")


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def draw(path: Path, title: str, histories: list[History], measure: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for rank, history in enumerate(histories):
        left.plot(smooth(history.losses), label=f"subnet of rank {rank}", linewidth=1)
    left.set(xlabel="step", ylabel="training loss (mean of 10 steps)", yscale="log")
    left.legend()
    right.plot(*zip(*histories[0].scores, strict=True), color="black", marker="o", markersize=4)
    right.set(xlabel="step", ylabel=f"{measure}, all subnets together", xlim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
