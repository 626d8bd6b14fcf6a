"""What train_pipeline.py says of every stage: the columns of its table."""

from dataclasses import dataclass

import numpy as np

from pyparallel.pipeline import Costs, Kind, PipelineTrainer, Simulation, Timeline
from ranks_report import print_columns

TIMES = "median milliseconds, of one microbatch"


@dataclass(frozen=True)
class StagePart:
    """What a rank has to say of one stage."""

    index: int
    rank: int
    layers: list[str]
    parameters: int
    weight_copies: int
    copy_bytes: int


@dataclass(frozen=True)
class Column:
    """One cell a stage, and what they mean; None: the name says it."""

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
    """Which part of the model each is."""
    return [
        Column("stage", [f"{part.index}" for part in parts]),
        Column("rank", [f"{part.rank}" for part in parts]),
        Column("layers", [name_layers(part.layers) for part in parts]),
        Column("parameters", [f"{part.parameters:,}" for part in parts]),
    ]


def columns_of_versions(parts: list[StagePart], costs: Costs, paper: Simulation) -> list[Column]:
    """Of schedules with one loss, on weights of some version."""
    times = costs.durations(len(parts))
    backward = times[[Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]].sum(axis=0)
    return [
        Column("forward", milliseconds(times[Kind.FORWARD]), TIMES),
        Column("backward", milliseconds(backward), TIMES),
        Column("update", milliseconds(times[Kind.UPDATE]), "median milliseconds"),
        column_of_copies(parts),
        column_of_held(paper.peak_activations),
        Column(
            "stale",
            whole(paper.forward_staleness),
            "updates that the weights of a forward are too old by, at most",
        ),
        Column(
            "ahead",
            whole(paper.forward_horizon),
            "updates that they are predicted ahead, at most",
        ),
    ]


def columns_of_window(
    parts: list[StagePart], costs: Costs, ran: Timeline, losses: list[str], loss_unit: str
) -> list[Column]:
    """Of interlocking, where every stage has a loss, and no weights are stale."""
    times = costs.durations(len(parts))
    return [
        Column("forward", milliseconds(times[Kind.FORWARD]), TIMES),
        Column("head", milliseconds(times[Kind.HEAD]), "likewise, of the stage's own loss"),
        Column("passing", milliseconds(times[Kind.BACKWARD_INPUT]), PASSING),
        Column("backward", milliseconds(times[Kind.LEARN]), LEARNING),
        Column("update", milliseconds(times[Kind.UPDATE]), "median milliseconds"),
        column_of_copies(parts),
        column_of_held(most_held(ran)),
        Column("loss", losses, f"of the head, last of all the model's; {loss_unit}, last tenth"),
    ]


PASSING = "likewise, of gradients that the stage does not learn from, or not yet"
LEARNING = "likewise, of those that it learns from"


def column_of_copies(parts: list[StagePart]) -> Column:
    return Column(
        "weights",
        [
            f"{part.weight_copies}, {part.weight_copies * part.copy_bytes / 1e6:.2f} MB"
            for part in parts
        ],
        "copies held at once, at most, and their size in all",
    )


def column_of_held(counts: np.ndarray) -> Column:
    return Column("held", whole(counts), "microbatches between their forward and backward, at most")


def most_held(ran: Timeline) -> np.ndarray:
    """(num_stages,) microbatches between their forward and what the stage learns from them."""
    kinds = ran.table.rows[:, 1]
    changes = (kinds == Kind.FORWARD).astype(int) - (kinds == Kind.LEARN)
    return np.array([changes[rows].cumsum().max() for rows in ran.table.stage_rows()])


def name_layers(names: list[str]) -> str:
    return f"{names[0]} .. {names[-1]}" if len(names) > 1 else names[0]


def milliseconds(seconds: np.ndarray) -> list[str]:
    """A dash for what never ran."""
    return [f"{1e3 * each:.2f}" if each else "-" for each in seconds]


def whole(counts: np.ndarray) -> list[str]:
    return [f"{each}" for each in counts]


def print_stages(columns: list[Column]) -> None:
    """The table, and below it what its columns mean."""
    cells = ([column.name, *column.cells] for column in columns)
    print_columns(list(zip(*cells, strict=True)))
    print()
    meanings = {column.name: column.meaning for column in columns if column.meaning}
    width = max(map(len, meanings))
    for name, meaning in meanings.items():
        print(f"{name:<{width}}  {meaning}")
