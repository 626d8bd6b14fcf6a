"""``python -m benchmarks.pipeline.timeline [--schedule interlocking --window 3] [--stages 4]``.

Trains a byte transformer in stages, one a gloo process, and prints what each stage costs: times,
copies of its weights, and the staleness that the schedule implies, or with interlocking the loss of
its head. Draws the last steps as they ran, above the same steps simulated with the median times.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness.link import loopback
from benchmarks.harness.ranks import run_ranks
from benchmarks.pipeline.tasks import Bytes
from pyparallel.cli.text_table import aligned
from pyparallel.pipeline import (
    Costs,
    GPipe,
    Interlocking,
    Kind,
    LinearHead,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipelineTrainer,
    PipeOptim,
    Schedule,
    Simulation,
    SpecTrain,
    Timeline,
    XPipe,
    ZeroBubble,
    costs_from_timeline,
    simulate,
    simulate_interlocking,
    timeline_from_trace,
)
from pyparallel.pipeline.simulation.picture import draw_timeline

SCHEDULES = {
    "gpipe": GPipe(),
    "1f1b": OneForwardOneBackward(),
    "zero-bubble": ZeroBubble(),
    "pipedream": PipeDream(),
    "2bw": PipeDream2BW(),
    "spectrain": SpecTrain(),
    "xpipe": XPipe(),
    "pipeoptim": PipeOptim(),
}
SHOWN = 12  # microbatches in the picture, about
TIMES = {
    "forward": (Kind.FORWARD,),
    "head": (Kind.HEAD,),
    "backward": (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.LEARN),
    "update": (Kind.UPDATE,),
}  # of the table, in median milliseconds a microbatch


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedule", choices=[*SCHEDULES, "interlocking"], default="pipeoptim")
    parser.add_argument("--window", type=int, default=2, help="of interlocking")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/timeline.png"))
    options = parser.parse_args()
    head = LinearHead(256, norm=nn.LayerNorm)
    schedules = SCHEDULES | {"interlocking": Interlocking(options.window, head)}
    schedule = schedules[options.schedule]
    shape = PipelineShape(options.stages, options.microbatches, options.stages)
    least = 3 + shape.num_stages
    problem = schedule.validation_error(shape)
    if problem or options.steps < least:
        parser.error(problem or f"--steps must be at least {least}, got {options.steps}")
    with loopback() as place:
        ranks = run_ranks(options.stages, place, 600, train, schedule, shape, options.steps)
    ran = timeline_from_trace(rank["spans"] for rank in ranks)
    simulated = simulate_steps(schedule, shape, costs_from_timeline(ran), options.steps)
    print(f"{schedule}, {shape.num_stages} stages, {shape.num_microbatches} microbatches\n")
    print(*aligned(table(ranks, ran, simulated)), sep="\n")
    steps = max(1, SHOWN // shape.num_microbatches)
    parts = {
        "as it ran": last_steps(ran, shape, steps),
        "simulated": last_steps(simulated, shape, steps),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw_timeline(parts, options.out, unit="s")
    print(f"\npicture: {options.out}")


def train(rank: int, schedule: Schedule, shape: PipelineShape, steps: int) -> dict[str, Any]:
    """Train, and return what this rank measured of its stage."""
    torch.manual_seed(0)
    task = Bytes("bytes", torch.optim.AdamW, (3e-3,), 3e-3, batch_size=4 * shape.num_microbatches,
                 context=128, width=64, num_layers=2 * shape.num_stages)  # fmt: skip
    trainer = PipelineTrainer(
        task.build(),
        task.loss,
        lambda parameters: task.make_optimizer(parameters, lr=task.main_rate),
        schedule,
        num_microbatches=shape.num_microbatches,
    )
    spans, losses = [], []
    for _, batch in zip(range(steps), task.batches(seed=0), strict=False):
        loss = trainer.step(*batch)
        spans += trainer.spans
        own = trainer.stages[0].head_loss if loss is None else loss
        losses += [] if own is None else [own * task.units_per_nat]
    (stage,) = trainer.stages
    return {
        "spans": spans,
        "parameters": sum(parameter.numel() for parameter in stage.module.parameters()),
        "weight copies": trainer.peak_weight_copies[0],
        "loss": sum(losses[-5:]) / 5 if losses else None,
    }


def simulate_steps(
    schedule: Schedule, shape: PipelineShape, costs: Costs, steps: int
) -> Timeline | Simulation:
    """Simulate from an empty pipeline; what ran may end with microbatches in flight."""
    if isinstance(schedule, Interlocking):
        return simulate_interlocking(schedule, shape, costs, steps=steps)
    actions = [schedule.rank_actions(shape, rank, steps) for rank in range(shape.num_ranks)]
    return simulate(actions, costs, schedule.versions(shape))


def last_steps(timeline: Timeline, shape: PipelineShape, steps: int) -> Timeline:
    """Return the steps before the last one, which may be incomplete."""
    begins = timeline.step_starts(shape.num_microbatches)
    return timeline.between(begins[-1 - steps], begins[-1])


def table(
    ranks: Sequence[dict[str, Any]], ran: Timeline, simulated: Timeline
) -> list[tuple[str, ...]]:
    """Return the heading, and a row for each stage."""
    times = costs_from_timeline(ran).durations(len(ranks))
    columns = {"stage": range(len(ranks)), "parameters": [r["parameters"] for r in ranks]}
    columns |= {
        f"{name}, ms": [f"{1e3 * each:.2f}" for each in times[list(kinds)].sum(axis=0)]
        for name, kinds in TIMES.items()
        if np.any(times[list(kinds)])
    }
    columns["weight copies"] = [rank["weight copies"] for rank in ranks]
    if isinstance(simulated, Simulation):  # interlocking reads no stale weights
        columns["staleness"] = simulated.forward_staleness
        columns["horizon"] = simulated.forward_horizon
    if ranks[0]["loss"] is not None:
        columns["bits per byte"] = [f"{rank['loss']:.3f}" for rank in ranks]
    rows = zip(*([name, *map(str, cells)] for name, cells in columns.items()), strict=True)
    return list(rows)


if __name__ == "__main__":
    main()
