"""Train a transformer in a pipeline, where every rank holds some of its layers.

    torchrun --standalone --nproc-per-node 2 examples/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline.py --schedule interlocking

The text is Python's own source. First, for comparison, the pipeline empties before every update.
"""

import math
import time
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from tqdm import tqdm

from data import as_tensor, cut_windows, draw_windows, load_files
from models import build_transformer, byte_loss
from pyparallel import PipelineTrainer, optim, pipeline
from ranks import following, gather, join_ranks, log_metrics, make_parser, waiting
from show import draw, print_next, print_table, save_model, smooth

SCHEDULES = {
    "pipeoptim": pipeline.PipeOptim(),  # an update a microbatch, on predicted weights
    "interlocking": pipeline.Interlocking(1, pipeline.LinearHead(256, norm=nn.LayerNorm)),
    "pipedream": pipeline.PipeDream(),  # likewise, on weights kept from the forward
}


def train(name, schedule, options, text, held_out):
    torch.manual_seed(options.seed)
    trainer = PipelineTrainer(
        build_transformer(128, 64, 4, 4).to(text.device),  # context, width, layers, heads
        lambda output, target: byte_loss(output, target) / math.log(2),  # bits per byte
        lambda parameters: optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.99)),  # fused
        schedule,
        num_microbatches=4,
        num_stages=max(2, dist.get_world_size()),
        scheduler_fn=lambda optimizer: LinearLR(optimizer, 0.02, total_iters=50),  # warm-up
    )  # measured times decide which layers a rank holds; split=[3] would say it
    before = trainer.evaluate(*held_out)
    generator, losses, spans = torch.Generator().manual_seed(options.seed), [], []
    begin = time.perf_counter()
    for step in (bar := tqdm(range(options.steps), name, disable=before is None)):
        windows = draw_windows(text, 16, 129, generator)
        loss = trainer.step(windows[:, :-1], windows[:, 1:])  # every byte predicts the next
        spans.append(trainer.spans)  # what this rank computed when
        log_metrics(options.tensorboard, name, trainer.metrics(), step)
        losses += [] if loss is None else [loss]  # on the rank of the last stage; None elsewhere
        bar.set_postfix(loss=f"{loss or 0:.2f}", refresh=False)
    seconds = (time.perf_counter() - begin) / options.steps
    after = trainer.evaluate(*held_out)  # finishes the microbatches in flight first
    before, after, losses = gather((before, after, losses))[-1]
    state = trainer.full_state_dict()  # of the whole model, on rank 0
    updates = [span.action.kind for span in spans[-1]].count(pipeline.Kind.UPDATE)
    copies = " ".join(map(str, chain(*gather(trainer.peak_weight_copies))))
    costs = f"{updates}", f"{1000 * seconds:.0f}", waiting([*chain(*spans[-20:])]), copies
    column = [name, f"{after:.3f}", *costs]
    return column, f"{before:.3f}", smooth(losses), state, gather([*chain(*spans[-2:])])


def main():
    parser = make_parser(__doc__, steps=200)
    parser.add_argument("--schedule", choices=SCHEDULES, default="pipeoptim")
    options = parser.parse_args()
    device, schedule = join_ranks(options.seed), SCHEDULES[options.schedule]
    text, others = (as_tensor(files).to(device) for files in load_files())
    windows = cut_windows(others, 256, 129)
    data = options, text, (windows[:, :-1], windows[:, 1:])
    exact, before, exact_losses, *_ = train("1f1b", pipeline.OneForwardOneBackward(), *data)
    ours, _, losses, state, spans = train(options.schedule, schedule, *data)
    if dist.get_rank() == 0:
        names = "updates per step", "ms per step", "ranks wait", "weight copies by stage"
        rows = ["", "held-out bits per byte", *names]
        print_table(options.schedule, rows, ("untrained", before), exact, ours)
        curves, labels = {"1f1b": exact_losses, ours[0]: losses}, ("step", "training bits per byte")
        question = f"Does {ours[0]} learn as much per step as 1f1b?"
        picture = draw(options.out / options.schedule, question, curves, *labels, spans=spans)
        note = "A rank waits while it has neither an activation nor a gradient to work on."
        load = save_model(state, options.out / options.schedule, "build_transformer(128, 64, 4, 4)")
        other = following(options.schedule, SCHEDULES)
        print_next(note, picture, load, f'make train-pipeline ARGS="--schedule {other}"')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
