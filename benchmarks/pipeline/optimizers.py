"""``python -m benchmarks.pipeline.optimizers``.

Do asynchronous pipelines train as well as synchronous ones, with AdamW, and with Muon for the
matrices of the blocks? A byte transformer with a stage for the embedding, one for each block and
one for the head. All contestants have the same batch per update, warm-up over the first tenth,
cosine decay, initial weights and batches; a batch is one microbatch for schedules that update after
each microbatch, and four for those that update once per step. Muon's rate is matched to AdamW's
(``adjust_lr_fn="match_rms_adamw"``), so one rate serves both.

The rate of each contestant is chosen by one rule: the best held-out loss of one seed after 500
updates, of ``RATES``, then of further doublings or halvings while the best is at an end, then of
the two neighbors of the best that are a factor of the square root of 2 away. Then ``FINALISTS``
train for longer with several seeds, each at its own rate, and with four stages at that of GPipe
with the same optimizer too. Rows that ``pipeline-optimizers.csv`` in ``benchmarks/results`` does
not have yet are appended; then the tables are printed.

One process holds all stages: the weights that a microbatch reads depend only on the schedule.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks.harness.learning_rate import next_rate
from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import Key, Row, RunRows
from benchmarks.pipeline import table
from benchmarks.pipeline.tasks import Bytes, Contestant, train
from pyparallel import pipeline

FIELDS = [
    "stages", "optimizer", "schedule", "correction", "rate", "updates", "seed", "options",
    "microbatches", "held_out_bits", "training_bits", "weight_copies", "torch", "commit", "losses",
]  # fmt: skip
SCHEDULES = {
    "GPipe": Contestant(pipeline.GPipe(), 4),
    "PipeDream": Contestant(pipeline.PipeDream(), 1),
    "2BW": Contestant(pipeline.PipeDream2BW(), 4),
    "PipeOptim": Contestant(pipeline.PipeOptim(), 1),
    "PipeOptim, consistent": Contestant(pipeline.PipeOptim("consistent"), 1),
}
NO_CORRECTION = "none"
CORRECTIONS = {
    NO_CORRECTION: None,
    "error feedback": pipeline.UpdateErrorFeedback(),
    "error feedback by delay": pipeline.UpdateErrorFeedback(None),
    "stage momentum": pipeline.StageMomentum(),
}
# Error feedback by delay is that of the paper where the delay is 1.
CORRECTED = {
    "PipeDream": list(CORRECTIONS)[1:],
    "2BW": ["error feedback", "stage momentum"],
    "PipeOptim": list(CORRECTIONS)[1:],
}
RATES = (0.006, 0.012, 0.024)
WARM_UP = 0.1  # of the updates
SEARCH_UPDATES, FINAL_UPDATES = 500, 1500
SEEDS = {4: 5, 8: 3}
FINALISTS = ("GPipe", "2BW", "PipeOptim", "PipeOptim, consistent")  # and the best correction


class MarkedBytes(Bytes):
    """The byte transformer, with a mark on the parameters that are for Muon.

    Embeddings begin as torch's do, with a standard deviation of 1. From 0.02, as in the examples,
    GPipe is worse, and delayed Adam, whose first steps are as long as such weights, far worse.
    """

    @override
    def build(self) -> nn.Sequential:
        model = super().build()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.reset_parameters()
        for block in model[1:-1]:
            for parameter in block.parameters():
                if parameter.ndim == 2:
                    parameter.use_muon = True
        return model


def bytes_in_stages(stages: int, **options: Any) -> MarkedBytes:
    """Return the task; its optimizer is replaced in each run."""
    return MarkedBytes(f"{stages} stages", torch.optim.AdamW, (), 0.0, **options)


MODELS = {
    depth: bytes_in_stages(depth, width=32, num_layers=depth - 2, split=tuple(range(1, depth)))
    for depth in SEEDS
}
# For ranks that compute: the embedding with half of the blocks, the other half with the head.
IN_TWO = bytes_in_stages(
    2, width=64, num_layers=4, num_heads=4, context=64, batch_size=16, split=(3,)
)
MODELS[2] = IN_TWO


@dataclass(frozen=True)
class Run:
    """A training run, which has one row."""

    stages: int
    optimizer: str
    schedule: str
    correction: str
    rate: float
    updates: int
    seed: int = 0

    @property
    def key(self) -> Key:
        return tuple(map(str, astuple(replace(self, rate=f"{self.rate:g}"))))


class Rows(RunRows):
    """The rows of a file, to which those of new runs are added."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, FIELDS, num_keys=7)

    def score(self, run: Run) -> float:
        """Return the held-out bits per byte of a run, performed if it has no row."""
        self.complete([run], perform)
        return float(self.read()[run.key]["held_out_bits"])


def perform(run: Run) -> Row:
    contestant = replace(SCHEDULES[run.schedule], correction=CORRECTIONS[run.correction])
    if run.schedule == "2BW":  # as its paper requires: else it delays by more updates
        contestant = replace(contestant, microbatches=run.stages)
    task = replace(MODELS[run.stages], make_optimizer=MAKERS[run.optimizer])
    outcome = train(task, contestant, run.rate, run.seed, run.updates, WARM_UP)
    options = repr(contestant.schedule)
    if contestant.correction is not None:
        options += f", {contestant.correction!r}"
    return {
        **outcome.columns,
        "options": options,
        "microbatches": str(contestant.microbatches),
        "held_out_bits": f"{outcome.held_out_loss:.5f}",
        "training_bits": f"{outcome.training_loss:.5f}",
    }


def adamw(parameters: list[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)


def muon(parameters: list[nn.Parameter], lr: float) -> list[Optimizer]:
    """Return Muon for the matrices of blocks, AdamW for embeddings, head and vectors."""
    matrices = [p for p in parameters if hasattr(p, "use_muon")]
    rest = [p for p in parameters if not hasattr(p, "use_muon")]
    optimizers: list[Optimizer] = []
    if matrices:
        options: dict[str, Any] = {"weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(matrices, lr=lr, **options))
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=lr))
    return optimizers


MAKERS = {"adamw": adamw, "muon": muon}


def choose_rate(rows: Rows, run: Run) -> float:
    scores = {rate: rows.score(replace(run, rate=rate)) for rate in RATES}
    while (rate := next_rate(scores)) is not None:
        scores[rate] = rows.score(replace(run, rate=rate))
    best = min(scores, key=scores.__getitem__)
    for rate in (best / math.sqrt(2), best * math.sqrt(2)):
        rounded = float(f"{rate:.2g}")
        scores[rounded] = rows.score(replace(run, rate=rounded))
    return min(scores, key=scores.__getitem__)


def search(
    rows: Rows, stages: int, optimizer: str, contestants: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return each contestant's best rate, and the held-out bits at it."""
    found = {}
    for schedule, correction in contestants:
        run = Run(stages, optimizer, schedule, correction, 0.0, SEARCH_UPDATES)
        rate = choose_rate(rows, run)
        found[schedule, correction] = rate, rows.score(replace(run, rate=rate))
    return found


def finals(
    stages: int, optimizer: str, found: dict[tuple[str, str], tuple[float, float]]
) -> Iterator[Run]:
    """Yield the long runs: at each one's own rate, and with four stages at GPipe's too."""
    corrected = [each for each in found if each[1] != NO_CORRECTION]
    best = min(corrected, key=lambda each: found[each][1])
    gpipes_rate = found["GPipe", NO_CORRECTION][0]
    for seed in range(SEEDS[stages]):
        for schedule, correction in [*((name, NO_CORRECTION) for name in FINALISTS), best]:
            rates = [found[schedule, correction][0], *([gpipes_rate] if stages == 4 else [])]
            for rate in dict.fromkeys(rates):
                yield Run(stages, optimizer, schedule, correction, rate, FINAL_UPDATES, seed)


def every_contestant(stages: int) -> list[tuple[str, str]]:
    """Return schedules without a correction, and some with each.

    Two stages are those of ``benchmarks.pipeline.clock``, which needs two rates alone. With eight,
    whose runs are long, only those that train for longer are searched.
    """
    if stages == 2:
        return [("GPipe", NO_CORRECTION), ("PipeOptim", NO_CORRECTION)]
    if stages == 8:
        corrected = [(name, "error feedback") for name in ("2BW", "PipeOptim")]
        return [*((schedule, NO_CORRECTION) for schedule in FINALISTS), *corrected]
    plain = [(schedule, NO_CORRECTION) for schedule in SCHEDULES]
    return [*plain, *((schedule, name) for schedule, names in CORRECTED.items() for name in names)]


def main() -> None:
    options = make_parser("pipeline.optimizers", __doc__, "pipeline-optimizers").parse_args()
    torch.set_num_threads(1)
    rows = Rows(options.out)
    for stages, optimizer in product(MODELS, MAKERS):
        found = search(rows, stages, optimizer, every_contestant(stages))
        if stages in SEEDS:
            rows.complete(finals(stages, optimizer, found), perform)
    known = list(rows.read().values())
    print(table.searched(known), table.finals(known), sep="\n")


if __name__ == "__main__":
    main()
