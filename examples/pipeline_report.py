"""What train_pipeline.py measures, and how rank 0 prints, draws and saves it."""

import json
import math
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from pipeline_steps import History, Run, calls_to_fill, draw, simulate_steps, waiting_of
from pyparallel.pipeline import Costs, PipelineTrainer, Simulation, Span, measure_costs, record
from ranks_report import gather, print_columns, print_table

COLUMNS = (
    "stage", "rank", "layers", "parameters", "forward", "backward", "update", "weights", "held",
    "stale", "ahead",
)  # fmt: skip
LEGEND = """
forward, backward, update  median milliseconds, of one microbatch
weights                    copies held at once, at most, and their size in all
held                       microbatches between their forward and backward, at most
stale                      updates that the weights of a forward are too old by, at most
ahead                      updates that they are predicted ahead, at most"""


@dataclass(frozen=True)
class Part:
    """What one rank has to say at the end."""

    spans: list[Span]
    calls: int  # in which they ran
    stages: list["StagePart"]
    memory: tuple[int, int]  # bytes before the first step, and at most in training
    step_seconds: float
    losses: list[float]
    held_out: float | None  # nats per byte


@dataclass(frozen=True)
class StagePart:
    """What a rank has to say of one stage."""

    index: int
    layers: list[str]
    parameters: int
    weight_copies: int
    copy_bytes: int


def report(trainer: PipelineTrainer, run: Run, history: History, held_out: float | None) -> None:
    """Bring the ranks' parts together; rank 0 prints, draws and saves."""
    parts = gather(describe_rank(trainer, history, held_out))
    run.out.mkdir(parents=True, exist_ok=True)
    for stage in trainer.stages:
        torch.save(stage.module.state_dict(), run.out / f"stage-{stage.index}.pt")
    if dist.get_rank() != 0:
        return
    timeline = record(part.spans for part in parts)
    costs = measure_costs(timeline)
    paper = simulate_steps(run, costs, parts[0].calls)
    waiting = waiting_of(timeline, run.layout), waiting_of(paper, run.layout)
    print_table(run.name, rows(run, parts, waiting))
    print()
    print_columns([COLUMNS, *stage_rows(run, parts, costs, paper)])
    print(LEGEND)
    draw(run, timeline, paper)
    results = {
        "schedule": repr(run.schedule),
        "num_stages": run.layout.num_stages,
        "num_ranks": run.layout.num_ranks,
        "num_microbatches": run.layout.num_microbatches,
        "held_out_bits": parts[-1].held_out / math.log(2),
        "tokens_per_second": run.step_tokens / parts[0].step_seconds,
        "waiting": waiting[0],
        "waiting_on_paper": waiting[1],
        "weight_copies": [stage.weight_copies for stage in in_order(parts)],
        "peak_memory_of_ranks": [part.memory[1] for part in parts],
        "losses": parts[-1].losses,
    }
    (run.out / "results.json").write_text(json.dumps(results))
    print(f"\npicture: {run.out / 'pipeline.png'}\nweights: {run.out / 'stage-*.pt'}")


def describe_rank(trainer: PipelineTrainer, history: History, held_out: float | None) -> Part:
    stages = [
        StagePart(
            stage.index,
            [name for name, _ in stage.module.named_children()],
            sum(parameter.numel() for parameter in stage.module.parameters()),
            copies,
            sum(parameter.nbytes for parameter in stage.module.parameters()),
        )
        for stage, copies in zip(trainer.stages, trainer.peak_weight_copies, strict=True)
    ]
    return Part(
        history.recent_spans(),
        len(history.recent),
        stages,
        (history.memory_before, history.memory),
        history.step_seconds,
        history.losses,
        held_out,
    )


def in_order(parts: list[Part]) -> list[StagePart]:
    return sorted(chain.from_iterable(part.stages for part in parts), key=lambda each: each.index)


def rows(run: Run, parts: list[Part], waiting: tuple[float, float]) -> list[tuple[str, str]]:
    last = parts[-1]
    tenth = last.losses[-(-len(last.losses) * 9 // 10) :]
    rate = run.step_tokens / parts[0].step_seconds
    per_step = run.schedule.update_index(run.layout, run.layout.num_microbatches)
    updates = per_step * len(last.losses)
    watched = last.calls - calls_to_fill(run.layout) - 1
    return [
        ("held-out bits per byte", f"{last.held_out / math.log(2):.3f}"),
        ("training, last tenth", f"{sum(tenth) / len(tenth) / math.log(2):.3f} bits per byte"),
        ("steps", f"{len(last.losses)} of {run.step_tokens:,} tokens (bytes), {updates:,} updates"),
        ("text", run.text),
        ("tokens (bytes) per second", f"{rate:,.0f}"),
        ("waiting, measured", f"{waiting[0]:.1%} of the ranks' time, over {watched} steps"),
        ("waiting, simulated", f"{waiting[1]:.1%}, with the median times below"),
        *((f"peak memory, rank {rank}", memory_of(part)) for rank, part in enumerate(parts)),
    ]


def memory_of(part: Part) -> str:
    what = "tensors" if torch.cuda.is_available() else "the process"
    before, peak = part.memory
    return f"{peak / 1e6:,.0f} MB of {what}, {before / 1e6:,.0f} MB of it before the first step"


def stage_rows(
    run: Run, parts: list[Part], costs: Costs, paper: Simulation
) -> list[tuple[str, ...]]:
    forward, *backwards, update = costs.durations(run.layout.num_stages)
    return [
        (
            f"{stage}",
            f"{stage % run.layout.num_ranks}",
            f"{part.layers[0]} .. {part.layers[-1]}" if len(part.layers) > 1 else part.layers[0],
            f"{part.parameters:,}",
            f"{1e3 * forward[stage]:.2f}",
            f"{1e3 * sum(each[stage] for each in backwards):.2f}",
            f"{1e3 * update[stage]:.2f}",
            f"{part.weight_copies}, {part.weight_copies * part.copy_bytes / 1e6:.2f} MB",
            f"{paper.peak_activations[stage]}",
            f"{paper.forward_staleness[stage]}",
            f"{paper.forward_horizon[stage]}",
        )
        for stage, part in enumerate(in_order(parts))
    ]
