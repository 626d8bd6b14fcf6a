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
    # An update a microbatch, on predicted weights; attention needs its first updates undelayed.
    "pipeoptim": pipeline.PipeOptim(synchronous_updates="warm-up"),
    "interlocking": pipeline.Interlocking(1, pipeline.LinearHead(256, norm=nn.LayerNorm)),
    # Likewise, on weights kept from the forward.
    "pipedream": pipeline.PipeDream(synchronous_updates="warm-up"),
}


def train(name, schedule, options, text, held_out):
    """Return a column of the table, the loss before, the losses, the weights and the spans."""
    torch.manual_seed(options.seed)
    layers = build_transformer(context=128, width=64, num_layers=4, num_heads=4).to(text.device)
    stages = max(2, dist.get_world_size())
    trainer = PipelineTrainer(
        layers,
        lambda output, target: byte_loss(output, target) / math.log(2),  # bits per byte
        lambda parameters: optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.99)),  # fused
        schedule,
        num_microbatches=4,
        num_stages=stages,
        # Without a split, measured times decide which layers a rank holds.
        split=[stage * len(layers) // stages for stage in range(1, stages)],
        scheduler_fn=lambda optimizer: LinearLR(optimizer, 0.02, total_iters=50),  # warm-up
        max_norm=None if name == "interlocking" else 1.0,  # several losses have no one gradient
    )
    before = trainer.evaluate(*held_out)

    generator = torch.Generator().manual_seed(options.seed)
    losses = []
    spans = []  # what this rank computed when, by step
    begin = time.perf_counter()
    bar = tqdm(range(options.steps), name, disable=dist.is_initialized() and dist.get_rank() > 0)
    for step in bar:
        windows = draw_windows(text, 16, 129, generator)
        loss = trainer.step(windows[:, :-1], windows[:, 1:])  # every byte predicts the next
        spans.append(trainer.spans)
        log_metrics(options.tensorboard, name, trainer.metrics(), step)
        losses.append(loss)
        bar.set_postfix(loss=f"{loss:.2f}", refresh=False)
    seconds = time.perf_counter() - begin

    after = trainer.evaluate(*held_out)  # finishes the microbatches in flight first
    losses = gather(losses)[-1]  # of the last stage's rank, which has each step's own
    state = trainer.full_state_dict()  # of the whole model, on rank 0

    updates = [span.action.kind for span in spans[-1]].count(pipeline.Kind.UPDATE)
    copies = chain(*gather(trainer.peak_weight_copies))
    column = [
        name,
        f"{after:.3f}",
        f"{updates}",
        f"{1000 * seconds / options.steps:.0f}",
        waiting(list(chain(*spans[-20:]))),
        " ".join(map(str, copies)),
    ]
    last_two_steps = gather(list(chain(*spans[-2:])))
    return column, f"{before:.3f}", smooth(losses), state, last_two_steps


def main():
    parser = make_parser(__doc__, steps=200)
    parser.add_argument("--schedule", choices=SCHEDULES, default="pipeoptim")
    options = parser.parse_args()
    device = join_ranks(options.seed)

    text, others = (as_tensor(files).to(device) for files in load_files())
    windows = cut_windows(others, 256, 129)
    held_out = windows[:, :-1], windows[:, 1:]

    flushing = pipeline.OneForwardOneBackward()
    exact, untrained, exact_losses, *_ = train("1f1b", flushing, options, text, held_out)
    schedule = SCHEDULES[options.schedule]
    ours, _, losses, state, spans = train(options.schedule, schedule, options, text, held_out)
    if dist.get_rank() == 0:
        report(options, untrained, exact, exact_losses, ours, losses, state, spans)
    dist.destroy_process_group()


def report(options, untrained, exact, exact_losses, ours, losses, state, spans):
    """Print the table, draw losses and timeline, and save the model."""
    name = options.schedule
    headings = [
        "",
        "held-out bits per byte",
        "updates per step",
        "ms per step",
        "ranks wait",
        "weight copies by stage",
    ]
    print_table(name, headings, ("untrained", untrained), exact, ours)

    picture = draw(
        options.out / name,
        f"Does {name} learn as much per step as 1f1b?",
        {"1f1b": exact_losses, name: losses},
        "step",
        "training bits per byte",
        spans=spans,
    )
    load = save_model(state, options.out / name, "build_transformer(128, 64, 4, 4)")
    print_next(
        "A rank waits while it has neither an activation nor a gradient to work on.",
        picture,
        load,
        f'make train-pipeline ARGS="--schedule {following(name, SCHEDULES)}"',
    )


if __name__ == "__main__":
    main()
