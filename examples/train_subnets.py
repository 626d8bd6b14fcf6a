"""Train on several ranks, each with its own units of every hidden dimension.

    make train-subnets
    torchrun --standalone --nproc-per-node 4 examples/train_subnets.py --interval 100
    torchrun --standalone --nproc-per-node 4 examples/train_subnets.py --data text
    torchrun --standalone --nproc-per-node 4 examples/train_subnets.py --data text --scale unscaled

No data needs a download: a convolutional network learns scikit-learn's 1,797 digits of 8 x 8
pixels, with channels and hidden units divided among the ranks, or a small transformer learns the
bytes of Python's own standard library, with attention heads and feed-forward units divided. The
loops are in subnets_digits.py and subnets_text.py. Rank 0 prints a table and writes subnets.png
(loss of each subnet, score of the full model), subnets.pt (the full model, for the plain module)
and results.json to --out.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from launch import join_ranks, positive
from pyparallel.subnets import (
    Averaged,
    CarryState,
    ResetState,
    Scale,
    Scaled,
    SubnetTrainer,
    Unscaled,
    shrink_consumers,
)
from subnets_digits import Digits
from subnets_report import report
from subnets_text import Text

DATA = {"digits": Digits, "text": Text}
SCALES: dict[str, Scale] = {
    "unscaled": Unscaled(),
    "averaged": Averaged(),
    "scaled": Scaled(),
}
STATES = {"carry": CarryState(), "reset": ResetState()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=list(DATA), default="digits")
    parser.add_argument("--interval", type=positive, default=20, help="steps between merges: 20")
    parser.add_argument("--scale", choices=list(SCALES), help="digits: unscaled, text: averaged")
    parser.add_argument("--optimizer-state", choices=list(STATES), default="carry")
    parser.add_argument("--epochs", type=positive, help="of digits: 20")
    parser.add_argument("--steps", type=positive, help="per rank, instead of epochs; text: 1000")
    parser.add_argument("--batch-size", type=positive, help="per rank; digits: 16, text: 4")
    parser.add_argument("--lr", type=float, help="digits: 0.05, text: 0.01")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/subnets"))
    options = parser.parse_args()
    if options.epochs and (options.steps or options.data == "text"):
        parser.error(
            "--epochs must not be combined with --steps or --data text: text is bounded by --steps"
        )
    return options


def main() -> None:
    options = parse_arguments()
    device = join_ranks()
    torch.manual_seed(options.seed)
    asked = {name: getattr(options, name) for name in ("epochs", "steps", "batch_size", "lr")}
    given = {name: value for name, value in asked.items() if value is not None}
    task = DATA[options.data](device, options.seed, **given)
    partition, scale = task.partition(), SCALES[options.scale or task.scale]
    model = task.build()
    shrink_consumers(model, partition, scale.enlargement(dist.get_world_size()))
    trainer = SubnetTrainer(
        model,
        task.make_optimizer,
        partition,
        options.interval,
        optimizer_state=STATES[options.optimizer_state],
        scale=scale,
    )
    history = task.train(trainer)
    report(trainer, task, history, options.interval, options.seed, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
