"""The report of train_pipeline.py, which rank 0 prints, draws and saves."""

import json
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from pipeline_stages import (
    Column,
    StagePart,
    columns_of_layers,
    columns_of_versions,
    columns_of_window,
    describe_stages,
    print_stages,
)
from pipeline_steps import History, Run, bubble_of, draw, simulate_steps, steps_to_fill
from pyparallel.pipeline import (
    Costs,
    PipelineTrainer,
    Simulation,
    Span,
    Timeline,
    costs_from_timeline,
    timeline_from_trace,
)
from ranks_report import gather, print_table


@dataclass(frozen=True)
class Part:
    """What one rank reports at the end."""

    spans: list[Span]
    steps: int  # in which they ran
    stages: list[StagePart]
    memory: tuple[int, int]  # bytes before the first step, and peak in training
    step_seconds: float
    losses: list[float]
    head_losses: dict[int, list[float]]
    held_out: float | None  # nats


def report(
    trainer: PipelineTrainer,
    run: Run,
    history: History,
    held_out: float | None,
    accuracy: float | None,
) -> None:
    """Gather the ranks' parts; rank 0 prints, draws and saves."""
    parts = gather(describe_rank(trainer, history, held_out))
    run.out.mkdir(parents=True, exist_ok=True)
    for stage in trainer.stages:
        torch.save(stage.module.state_dict(), run.out / f"stage-{stage.index}.pt")
    if dist.get_rank() != 0:
        return
    ran = timeline_from_trace(part.spans for part in parts)
    costs = costs_from_timeline(ran)
    simulated = simulate_steps(run, costs, parts[0].steps)
    bubbles = bubble_of(ran, run.shape), bubble_of(simulated, run.shape)
    quality = rows_of_quality(run, parts[-1], accuracy)
    print_table(run.name, [*quality, *rows_of_speed(run, parts, bubbles)])
    print()
    print_stages(columns(run, parts, costs, (ran, simulated)))
    draw(run, ran, simulated)
    results = {
        "schedule": repr(run.schedule),
        "num_stages": run.shape.num_stages,
        "num_ranks": run.shape.num_ranks,
        "num_microbatches": run.shape.num_microbatches,
        "loss_unit": run.task.loss_unit,
        "held_out": parts[-1].held_out * run.task.per_nat,
        "accuracy": accuracy,
        "items_per_second": run.task.step_items / parts[0].step_seconds,
        "bubble": bubbles[0],
        "bubble_simulated": bubbles[1],
        "weight_copies": [stage.weight_copies for stage in in_order(parts)],
        "peak_memory_of_ranks": [part.memory[1] for part in parts],
        "losses": parts[-1].losses,
        "losses_of_heads": losses_of_heads(parts),
    }
    (run.out / "results.json").write_text(json.dumps(results))
    print(f"\npicture: {run.out / 'pipeline.png'}\nweights: {run.out / 'stage-*.pt'}")


def describe_rank(trainer: PipelineTrainer, history: History, held_out: float | None) -> Part:
    return Part(
        history.recent_spans(),
        len(history.recent),
        describe_stages(trainer, dist.get_rank()),
        (history.memory_before, history.memory),
        history.step_seconds,
        history.losses,
        history.head_losses,
        held_out,
    )


def in_order(parts: list[Part]) -> list[StagePart]:
    return sorted(chain.from_iterable(part.stages for part in parts), key=lambda each: each.index)


def losses_of_heads(parts: list[Part]) -> list[list[float]]:
    """Return the losses of all stages but the last; empty without heads."""
    found = dict(chain.from_iterable(part.head_losses.items() for part in parts))
    return [found[stage] for stage in sorted(found)]


def rows_of_quality(run: Run, last: Part, accuracy: float | None) -> list[tuple[str, str]]:
    unit = run.task.loss_unit
    rows = [
        (f"held-out {unit}", f"{last.held_out * run.task.per_nat:.3f}"),
        ("training, last tenth", f"{mean_of_tenth(last.losses):.3f} {unit}"),
    ]
    return rows if accuracy is None else [("test accuracy", f"{accuracy:.2%}"), *rows]


def mean_of_tenth(losses: list[float]) -> float:
    """Return the mean of the last tenth, of one loss at least."""
    tenth = losses[-max(1, len(losses) // 10) :]
    return sum(tenth) / len(tenth)


def rows_of_speed(
    run: Run, parts: list[Part], bubbles: tuple[float, float]
) -> list[tuple[str, str]]:
    items, item = run.task.step_items, run.task.item
    steps = len(parts[-1].losses)
    updates = steps * run.schedule.update_index(run.shape, run.shape.num_microbatches)
    watched = parts[-1].steps - steps_to_fill(run.shape) - 1
    return [
        ("steps", f"{steps} of {items:,} {item}, {updates:,} updates"),
        ("data", run.data_size),
        (f"{item} per second", f"{items / parts[0].step_seconds:,.0f}"),
        ("bubble, measured", f"{bubbles[0]:.1%} of the ranks' time, over {watched} steps"),
        ("bubble, simulated", f"{bubbles[1]:.1%}, with the median times below"),
        *((f"peak memory, rank {rank}", memory_of(part)) for rank, part in enumerate(parts)),
    ]


def memory_of(part: Part) -> str:
    what = "tensors" if torch.cuda.is_available() else "the process"
    before, peak = part.memory
    return f"{peak / 1e6:,.0f} MB of {what}, {before / 1e6:,.0f} MB of it before the first step"


def columns(
    run: Run, parts: list[Part], costs: Costs, timelines: tuple[Timeline, Timeline]
) -> list[Column]:
    """Return the columns of the table of stages; the timelines are measured and simulated."""
    ran, simulated = timelines
    stages = in_order(parts)
    if isinstance(simulated, Simulation):
        return [*columns_of_layers(stages), *columns_of_versions(stages, costs, simulated)]
    losses = [*losses_of_heads(parts), parts[-1].losses]
    means = [f"{mean_of_tenth(each):.3f}" for each in losses]
    of_window = columns_of_window(stages, costs, ran, means, run.task.loss_unit)
    return [*columns_of_layers(stages), *of_window]
