"""Train a model in pipeline stages, one or more on each rank.

    make train
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py --schedule gpipe
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py --stages 4
    torchrun --standalone --nproc-per-node 1 examples/train_pipeline.py --stages 4 --optimizer sgd
    torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py --schedule interlocking
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py --data digits

No data is downloaded: a small transformer learns the bytes of Python's standard library, or a
convolutional net learns scikit-learn's 1,797 digits of 8 x 8 pixels; see pipeline_text.py and
pipeline_digits.py. The rank of the last stage shows the progress; rank 0 prints a table and writes
pipeline.png (the timelines, measured and simulated) and results.json to --out; each rank writes
stage-S.pt for each of its stages: merged into one dict they load into the plain model.
"""

import argparse
import os
import sys
from collections import ChainMap
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from launch import join_ranks, positive
from learning_rate import rate, set_rate
from pipeline_digits import Digits
from pipeline_report import report
from pipeline_steps import History, Run, steps_to_fill
from pipeline_task import Data, Task
from pipeline_text import Text
from pyparallel.pipeline import (
    GPipe,
    Interleaved,
    Interlocking,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    Schedule,
    SpecTrain,
    XPipe,
    ZeroBubble,
)
from ranks_report import gather

DATA = {"text": Text, "digits": Digits}
SCHEDULES = {
    "gpipe": GPipe(),
    "1f1b": OneForwardOneBackward(),
    "interleaved": Interleaved(),
    "zero-bubble": ZeroBubble(),
    "pipedream": PipeDream(),
    "2bw": PipeDream2BW(),
    "spectrain": SpecTrain(),
    "xpipe": XPipe(),
    "pipeoptim": PipeOptim(),
    "pipemare": PipeMare(annealing=200, decay=0.135),
    "interlocking": Interlocking(window=2),
}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": partial(torch.optim.Adam, betas=(0.9, 0.99)),
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.1),
}


def parse_arguments(num_ranks: int) -> tuple[argparse.Namespace, Task, Schedule, PipelineShape]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=list(DATA), default="text")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="pipeoptim")
    parser.add_argument(
        "--window",
        type=positive,
        help="of interlocking: number of losses in reach of a stage (default: 2)",
    )
    parser.add_argument(
        "--stages",
        type=positive,
        help="a multiple of the ranks (default: one per rank, at least 2)",
    )
    parser.add_argument("--microbatches", type=positive, default=4, help="per step (default: 4)")
    parser.add_argument(
        "--batch-size", type=positive, help="samples per step (default: text 16, digits 64)"
    )
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--lr", type=float, help="default: sgd 0.1, digits 0.05; adam(w) 0.003")
    parser.add_argument("--steps", type=positive, default=250, help="default: 250")
    parser.add_argument("--blocks", type=positive, help="of the transformer (default: 4)")
    parser.add_argument("--width", type=positive, help="of the transformer (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"))
    options = parser.parse_args()
    try:
        task = choose_task(options)
        schedule = choose_schedule(options, task)
        shape = PipelineShape(options.stages or max(2, num_ranks), options.microbatches, num_ranks)
        check(options, task, schedule, shape)
    except ValueError as error:
        parser.error(str(error))
    options.lr = task.rates[options.optimizer] if options.lr is None else options.lr
    return options, task, schedule, shape


def choose_task(options: argparse.Namespace) -> Task:
    asked = {name: getattr(options, name) for name in ("batch_size", "blocks", "width")}
    given = {name: value for name, value in asked.items() if value is not None}
    if options.data == "digits" and given.keys() - {"batch_size"}:
        raise ValueError("--blocks and --width must be used with --data text")
    return DATA[options.data](**given)


def choose_schedule(options: argparse.Namespace, task: Task) -> Schedule:
    schedule = SCHEDULES[options.schedule]
    if isinstance(schedule, Interlocking):
        return replace(schedule, window=options.window or schedule.window, heads=task.head)
    if options.window is not None:
        raise ValueError(
            f"--window must be used with --schedule interlocking, got {options.schedule}"
        )
    return schedule


def check(
    options: argparse.Namespace, task: Task, schedule: Schedule, shape: PipelineShape
) -> None:
    least = steps_to_fill(shape) + 2
    if options.steps < least:
        raise ValueError(
            f"--steps must be at least {least}, so that one is in steady state, got {options.steps}"
        )
    if task.batch_size < options.microbatches:
        raise ValueError(
            f"--batch-size must be at least one sample for each of {options.microbatches} "
            f"microbatches, got {task.batch_size}"
        )
    if shape.num_stages > task.num_layers:
        raise ValueError(
            f"--stages must be at most the {task.num_layers} layers of {task.layers}, got "
            f"{shape.num_stages}"
        )
    problem = schedule.validation_error(shape)
    if problem is not None:
        raise ValueError(problem)


def train(
    trainer: PipelineTrainer, history: History, data: Data, options: argparse.Namespace
) -> None:
    """Run the training loop."""
    bar = tqdm(
        range(options.steps), desc="steps", disable=dist.get_rank() + 1 < dist.get_world_size()
    )
    for step, (inputs, target) in zip(bar, data.batches, strict=False):
        optimizers = (stage.optimizer for stage in trainer.stages)  # none before the first step
        set_rate(optimizers, options.lr * rate(step, options.steps))
        history.record(trainer.step(inputs, target))
        if history.losses:
            bar.set_postfix_str(history.show_progress(), refresh=False)


def assemble(model: nn.Module, trainer: PipelineTrainer) -> nn.Module:
    """Return the model with the trained weights of all ranks, on all ranks."""
    states = (stage.module.state_dict().items() for stage in trainer.stages)
    mine = {name: tensor.cpu() for name, tensor in chain.from_iterable(states)}
    model.load_state_dict(dict(ChainMap(*gather(mine))))
    return model


def main() -> None:
    options, task, schedule, shape = parse_arguments(int(os.environ.get("WORLD_SIZE", "1")))
    device = join_ranks()
    torch.manual_seed(options.seed)
    data = task.read(device, options.seed, options.microbatches)
    model = task.build().to(device)
    trainer = PipelineTrainer(
        model,
        task.loss,
        partial(OPTIMIZERS[options.optimizer], lr=options.lr * rate(0, options.steps)),
        schedule,
        num_microbatches=options.microbatches,
        num_stages=shape.num_stages,
    )
    history = History(trainer, task, shape)
    train(trainer, history, data, options)
    held_out = trainer.evaluate(*data.held_out)
    accuracy = task.accuracy(assemble(model, trainer), data.held_out)
    name = (
        f"{schedule}, {shape.num_stages} stages on {shape.num_ranks} ranks, "
        f"{shape.num_microbatches} microbatches, {options.optimizer}, seed {options.seed}"
    )
    run = Run(name, schedule, shape, task, data.size, options.out)
    report(trainer, run, history, held_out, accuracy)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
