"""Train a model that is cut in depth, each rank holding one part of it or several.

    make train
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py --schedule gpipe
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py \\
        --schedule interleaved --stages 4 --microbatches 8
    torchrun --standalone --nproc-per-node 1 examples/train_pipeline.py --stages 4 --optimizer sgd

A small transformer learns the text of Python's own standard library by bytes; no download. The rank
of the last stage shows the progress, rank 0 prints a table and writes pipeline.png (what every rank
did when, beside what the simulator says), losses.csv and results.json to --out; every rank adds
stage-S.pt, the weights of its stages, which all together load into the bare model.
"""

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from byte_transformer import build_transformer, byte_loss
from pipeline_report import History, report
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
)
from standard_library import as_tensor, cut_windows, draw_windows, read_text_on_ranks

CONTEXT = 128  # bytes
NUM_WINDOWS = 256  # of the held-out bytes, evenly spaced, CONTEXT bytes each

SCHEDULES = {
    "gpipe": GPipe(),
    "1f1b": OneForwardOneBackward(),
    "interleaved": Interleaved(),
    "pipedream": PipeDream(),
    "2bw": PipeDream2BW(),
    "spectrain": SpecTrain(),
    "xpipe": XPipe(),
    "pipeoptim": PipeOptim(),
    "pipemare": PipeMare(),
}
OPTIMIZERS = {  # and their learning rates
    "sgd": (partial(torch.optim.SGD, momentum=0.9), 0.1),
    "adam": (partial(torch.optim.Adam, betas=(0.9, 0.99)), 5e-3),
    "adamw": (partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.1), 5e-3),
}


def parse_arguments() -> tuple[argparse.Namespace, Layout]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="pipeoptim")
    parser.add_argument("--stages", type=positive, help="a multiple of the ranks: one for each")
    parser.add_argument("--microbatches", type=positive, default=4, help="of each step: 4")
    parser.add_argument("--batch-size", type=positive, default=32, help="samples of a step: 32")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--lr", type=float, help="sgd: 0.1, adam and adamw: 0.005")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--blocks", type=positive, default=4, help="of the transformer: 4")
    parser.add_argument("--width", type=positive, default=64, help="a multiple of 4: 64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"))
    options = parser.parse_args()
    try:
        return options, plan(options, num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        parser.error(str(error))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return int(text)
