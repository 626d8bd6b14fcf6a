"""``python -m benchmarks.subnets.compare_scales [--scales unscaled averaged] [--seeds 0 1 2]``.

Trains subnets of a transformer on the text of Python's standard library, its heads and hidden units
divided among four gloo processes, with every scale of activations. Writes a row for each scale and
seed to ``subnets-scales.csv`` in ``benchmarks/results``: the bits per byte of the full model on
held-out text, by step, and those of the subnets on their own training data.
"""

import argparse
import itertools
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.learning_rate import rate
from benchmarks.harness.link import loopback
from benchmarks.harness.measure import RESULTS, commit
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import Key, Row, merge, read_rows, write_rows
from benchmarks.subnets.tasks import BLOCK
from examples.data import as_tensor, cut_windows, draw_windows, load_files
from examples.models import build_transformer, byte_loss
from pyparallel.subnets import (
    Averaged,
    Partition,
    Scaled,
    SubnetTrainer,
    Unscaled,
    shrink_consumers,
)

SCALES = {"unscaled": Unscaled(), "averaged": Averaged(), "scaled": Scaled()}
FIELDS = [
    "scale", "seed", "ranks", "interval", "steps", "score", "subnets_training", "torch", "commit",
    "at_steps", "at_score",
]  # fmt: skip
SECONDS = 1800  # a run's limit


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.subnets.compare_scales", description=__doc__
    )
    parser.add_argument("--scales", nargs="+", choices=list(SCALES), default=list(SCALES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--interval", type=int, default=20, help="steps between merges")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS / "subnets-scales.csv")
    options = parser.parse_args()
    for seed, name in itertools.product(options.seeds, options.scales):
        arguments = name, seed, options.steps, options.interval
        with loopback() as place:
            ranks = run_ranks(options.ranks, place, SECONDS, train, *arguments)
        row = as_row(*arguments, ranks)
        print(f"{name}, seed {seed}: {row['score']} held out, subnets {row['subnets_training']}")
        write_rows(merge(read_rows(options.out), row, key_of), options.out, FIELDS)


def key_of(row: Row) -> Key:
    return row["scale"], row["seed"]


def train(
    rank: int, scale: str, seed: int, steps: int, interval: int
) -> tuple[list[float], list[tuple[int, float]]]:
    """Return this rank's losses, and the full model's score by step, in bits per byte."""
    torch.manual_seed(seed)
    files, others = load_files()
    mine = as_tensor(files[rank :: dist.get_world_size()])
    windows = cut_windows(as_tensor(others), 256, 129)
    model = build_transformer(128, 64, num_layers=2, num_heads=8)
    partition = Partition({"1": BLOCK, "2": BLOCK}, seed)
    shrink_consumers(model, partition, SCALES[scale].enlargement(dist.get_world_size()))
    trainer = SubnetTrainer(
        model,
        lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.9, 0.99), weight_decay=0.1),
        partition,
        interval,
        scale=SCALES[scale],
    )
    draw = torch.Generator().manual_seed(seed * 1000 + rank)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda s: rate(s, steps))
    losses, scores = [], []
    for step in range(1, steps + 1):
        batch = draw_windows(mine, 4, 129, draw)
        trainer.optimizer.zero_grad()
        loss = byte_loss(trainer(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(trainer.subnet.parameters(), 1.0)
        trainer.optimizer.step()
        scheduler.step()
        losses.append(loss.item() / math.log(2))
        if step % 100 == 0 or step == steps:
            with trainer.full_model() as module:
                scores.append((step, score(module, windows)))
    return losses, scores


@torch.no_grad()
def score(module: nn.Module, windows: torch.Tensor) -> float:
    """Return the bits per byte of windows."""
    losses = [byte_loss(module(part[:, :-1]), part[:, 1:]) for part in windows.split(32)]
    return float(torch.stack(losses).mean()) / math.log(2)


def as_row(
    scale: str,
    seed: int,
    steps: int,
    interval: int,
    ranks: list[tuple[list[float], list[tuple[int, float]]]],
) -> Row:
    scores = ranks[0][1]
    last = [loss for losses, _ in ranks for loss in losses[-max(1, steps // 10) :]]
    return {
        "scale": scale,
        "seed": str(seed),
        "ranks": str(len(ranks)),
        "interval": str(interval),
        "steps": str(steps),
        "score": f"{scores[-1][1]:.5f}",
        "subnets_training": f"{sum(last) / len(last):.5f}",
        "torch": torch.__version__,
        "commit": commit(),
        "at_steps": " ".join(f"{step}" for step, _ in scores),
        "at_score": " ".join(f"{bits:.5f}" for _, bits in scores),
    }


if __name__ == "__main__":
    main()
