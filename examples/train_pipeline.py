"""Train a model that is cut in depth, each rank holding one part of it or several.

    make train
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py --schedule gpipe
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py --stages 4
    torchrun --standalone --nproc-per-node 1 examples/train_pipeline.py --stages 4 --optimizer sgd

A small transformer learns the text of Python's own standard library by bytes; no download. The rank
of the last stage shows the progress, rank 0 prints a table and writes pipeline.png (what every rank
did when, and what the simulator says) and results.json to --out; every rank adds stage-S.pt of its
stages: their dicts merged into one load into the bare model.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from byte_transformer import build_transformer, byte_loss
from learning_rate import rate, set_rate
from pipeline_report import report
from pipeline_steps import History, Run, calls_to_fill
from pyparallel.pipeline import (
    GPipe,
    Interleaved,
    Layout,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    SpecTrain,
    XPipe,
    ZeroBubble,
)
from standard_library import as_tensor, cut_windows, draw_windows, read_text_on_ranks

CONTEXT = 128  # bytes
HEADS = 4
NUM_WINDOWS = 256  # of the held-out bytes, evenly spaced, CONTEXT bytes each

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
}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": partial(torch.optim.Adam, betas=(0.9, 0.99)),
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.1),
}
RATES = {"sgd": 0.1, "adam": 3e-3, "adamw": 3e-3}


def parse_arguments(num_ranks: int) -> tuple[argparse.Namespace, Layout]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="pipeoptim")
    parser.add_argument(
        "--stages", type=positive, help="a multiple of the ranks; one for each, at least 2"
    )
    parser.add_argument("--microbatches", type=positive, default=4, help="of a step: 4")
    parser.add_argument("--batch-size", type=positive, default=16, help="samples of a step: 16")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--lr", type=float, help="sgd: 0.1, adam and adamw: 0.003")
    parser.add_argument("--steps", type=positive, default=250, help="250")
    parser.add_argument("--blocks", type=positive, default=4, help="of the transformer: 4")
    parser.add_argument("--width", type=positive, default=64, help="of the transformer: 64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"))
    options = parser.parse_args()
    options.lr = RATES[options.optimizer] if options.lr is None else options.lr
    try:
        layout = Layout(options.stages or max(2, num_ranks), options.microbatches, num_ranks)
        check(options, layout)
    except ValueError as error:
        parser.error(str(error))
    return options, layout


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return int(text)


def check(options: argparse.Namespace, layout: Layout) -> None:
    least = calls_to_fill(layout) + 2
    if options.steps < least:
        raise ValueError(
            f"--steps must be at least {least}, so that the pipe is full in one, got "
            f"{options.steps}"
        )
    if options.batch_size < options.microbatches:
        raise ValueError(
            f"--batch-size must be at least one sample for each of {options.microbatches} "
            f"microbatches, got {options.batch_size}"
        )
    if layout.num_stages > options.blocks + 2:
        raise ValueError(
            f"--stages must be at most the {options.blocks + 2} layers of {options.blocks} blocks, "
            f"an embedding and a head, got {layout.num_stages}"
        )
    if options.width % HEADS:
        raise ValueError(
            f"--width must be a multiple of the {HEADS} heads of attention, got {options.width}"
        )


def train(
    trainer: PipelineTrainer, history: History, text: Tensor, options: argparse.Namespace
) -> None:
    """The user's own loop; every rank draws the same windows, and reads what its stages need."""
    draw = torch.Generator().manual_seed(options.seed)
    bar = tqdm(
        range(options.steps), desc="steps", disable=dist.get_rank() + 1 < dist.get_world_size()
    )
    for step in bar:
        optimizers = (stage.optimizer for stage in trainer.stages)  # none before the first step
        set_rate(optimizers, options.lr * rate(step, options.steps))
        windows = draw_windows(text, options.batch_size, CONTEXT + 1, draw)
        history.note(trainer.step(windows[:, :-1], windows[:, 1:]))
        if history.losses:
            bar.set_postfix_str(f"{history.mean_bits(10):.2f} bits per byte", refresh=False)


def main() -> None:
    options, layout = parse_arguments(num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else None
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed)
    text = read_text_on_ranks(files_needed=1)
    model = build_transformer(CONTEXT, options.width, options.blocks, HEADS).to(device)
    schedule = SCHEDULES[options.schedule]
    trainer = PipelineTrainer(
        model,
        byte_loss,
        partial(OPTIMIZERS[options.optimizer], lr=options.lr * rate(0, options.steps)),
        schedule,
        num_microbatches=options.microbatches,
        num_stages=layout.num_stages,
    )
    history = History(trainer, layout)
    train(trainer, history, as_tensor(text.train, device), options)
    num_windows = max(NUM_WINDOWS, options.microbatches)
    windows = cut_windows(as_tensor(text.held_out, device), num_windows, CONTEXT + 1)
    held_out = trainer.evaluate(windows[:, :-1], windows[:, 1:])
    name = (
        f"{schedule}, {layout.num_stages} stages on {layout.num_ranks} ranks, "
        f"{layout.num_microbatches} microbatches, {options.optimizer}, seed {options.seed}"
    )
    run = Run(name, schedule, layout, options.batch_size * CONTEXT, text.size, options.out)
    report(trainer, run, history, held_out)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
