"""The columns of the table of stages that train_pipeline.py prints."""

from dataclasses import dataclass

import numpy as np

from pyparallel.pipeline import Costs, Kind, PipelineTrainer, Simulation, Timeline
from ranks_report import print_columns

TIMES = "median milliseconds per microbatch"


@dataclass(frozen=True)
class StagePart:
    """What a rank reports of one stage."""

    index: int
    rank: int
    layers: list[str]
    parameters: int
    weight_copies: int
    copy_bytes: int


@dataclass(frozen=True)
class Column:
    """A column with one cell per stage, and its meaning; None: the name is clear."""

    name: str
    cells: list[str]
    meaning: str | None = None


def describe_stages(trainer: PipelineTrainer, rank: int) -> list[StagePart]:
    return [
        StagePart(
            stage.index,
            rank,
            [name for name, _ in stage.module.named_children()],
            sum(parameter.numel() for parameter in stage.module.parameters()),
            copies,
            sum(parameter.nbytes for parameter in stage.module.parameters()),
        )
        for stage, copies in zip(trainer.stages, trainer.peak_weight_copies, strict=True)
    ]


def columns_of_layers(parts: list[StagePart]) -> list[Column]:
    """Return the columns of a stage's place and layers."""
    return [
        Column("stage", [f"{part.index}" for part in parts]),
        Column("rank", [f"{part.rank}" for part in parts]),
        Column("layers", [name_layers(part.layers) for part in parts]),
        Column("parameters", [f"{part.parameters:,}" for part in parts]),
    ]


def columns_of_versions(
    parts: list[StagePart], costs: Costs, simulated: Simulation
) -> list[Column]:
    """Return the columns of schedules with weight versions."""
    times = costs.durations(len(parts))
    backward = times[[Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]].sum(axis=0)
    return [
        Column("forward", milliseconds(times[Kind.FORWARD]), TIMES),
        Column("backward", milliseconds(backward), TIMES),
        Column("update", milliseconds(times[Kind.UPDATE]), "median milliseconds"),
        column_of_copies(parts),
        column_of_held(simulated.peak_activations),
        Column(
            "staleness",
            whole(simulated.forward_staleness),
            "updates by which a forward's weights are too old, at most",
        ),
        Column(
            "horizon",
            whole(simulated.forward_horizon),
            "updates that a forward's weights are predicted ahead, at most",
        ),
    ]


def columns_of_window(
    parts: list[StagePart], costs: Costs, ran: Timeline, losses: list[str], loss_unit: str
) -> list[Column]:
    """Return the columns of interlocking, where each stage has a loss, and no weights are stale."""
    times = costs.durations(len(parts))
    return [
        Column("forward", milliseconds(times[Kind.FORWARD]), TIMES),
        Column("head", milliseconds(times[Kind.HEAD]), "the same for the stage's own loss"),
        Column("passing", milliseconds(times[Kind.BACKWARD_INPUT]), PASSING),
        Column("backward", milliseconds(times[Kind.LEARN]), LEARNING),
        Column("update", milliseconds(times[Kind.UPDATE]), "median milliseconds"),
        column_of_copies(parts),
        column_of_held(peak_held(ran)),
        Column(
            "loss", losses, f"of the head, on the last stage of the model; {loss_unit}, last tenth"
        ),
    ]


PASSING = "the same for gradients that are only passed on to the previous stage"
LEARNING = "the same for the gradients that the stage learns from"


def column_of_copies(parts: list[StagePart]) -> Column:
    return Column(
        "weights",
        [
            f"{part.weight_copies}, {part.weight_copies * part.copy_bytes / 1e6:.2f} MB"
            for part in parts
        ],
        "peak number of weight copies, and their total size",
    )


def column_of_held(counts: np.ndarray) -> Column:
    return Column("held", whole(counts), "peak number of microbatches between forward and backward")


def peak_held(ran: Timeline) -> np.ndarray:
    """Return the peak number of microbatches between forward and backward: (num_stages,)."""
    kinds = ran.table.rows[:, 1]
    changes = (kinds == Kind.FORWARD).astype(int) - (kinds == Kind.LEARN)
    return np.array([changes[rows].cumsum().max() for rows in ran.table.stage_rows()])


def name_layers(names: list[str]) -> str:
    return f"{names[0]} .. {names[-1]}" if len(names) > 1 else names[0]


def milliseconds(seconds: np.ndarray) -> list[str]:
    """Format milliseconds; a dash for what never ran."""
    return [f"{1e3 * each:.2f}" if each else "-" for each in seconds]


def whole(counts: np.ndarray) -> list[str]:
    return [f"{each}" for each in counts]


def print_stages(columns: list[Column]) -> None:
    """Print the table, and below it the meaning of its columns."""
    cells = ([column.name, *column.cells] for column in columns)
    print_columns(list(zip(*cells, strict=True)))
    print()
    meanings = {column.name: column.meaning for column in columns if column.meaning}
    width = max(map(len, meanings))
    for name, meaning in meanings.items():
        print(f"{name:<{width}}  {meaning}")
