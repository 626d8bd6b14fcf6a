"""``python -m benchmarks.pipeline.parts [--code after] [--optimizer torch.optim.AdamW]``.

Where the time of a small microbatch goes in PipeOptim and 1F1B: two gloo processes on the CPU, one
thread each. Rows go to ``benchmarks/results/pipeline-parts-<machine>.csv``, replacing those of the
same ``--code``, the name of the code that is measured. Tables are printed.

The functions of the trainer are timed, each without those that it calls. That costs time itself,
about a microsecond a call: ``whole`` is what the same steps take without.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness.program import make_parser, save
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import Row, summary
from benchmarks.harness.turns import time_block
from benchmarks.pipeline.models import SMALL_MICROBATCHES, EncoderModel
from benchmarks.pipeline.systems import ADAMW, WARM_UP, Plan
from benchmarks.pipeline.systems.ours import ONE_FORWARD_ONE_BACKWARD, PIPE_OPTIM, OurSchedule
from pyparallel.pipeline import PipelineTrainer
from pyparallel.pipeline.messages import Channel
from pyparallel.pipeline.messages.stage_p2p import StageP2P
from pyparallel.pipeline.prediction.flat_predictor import FlatWeightPredictor
from pyparallel.pipeline.runtime.loss import Criterion
from pyparallel.pipeline.runtime.stage import Stage
from pyparallel.pipeline.runtime.weight_copies import WeightCopies

FIELDS = [
    "code", "system", "microbatches", "stage", "part", "median_ms", "p20_ms", "p80_ms", "share",
    "compute", "optimizer", "torch", "commit",
]  # fmt: skip
FORWARD, BACKWARD = "forward", "backward"
WEIGHTS = "looking up and re-pointing weights"
UPDATE, PREDICTION = "update", "prediction"
WAITING, MESSAGES = "waiting for the other stage", "sending and receiving"
OTHER, WHOLE = "other Python", "whole"
PARTS = [FORWARD, BACKWARD, WEIGHTS, UPDATE, PREDICTION, WAITING, MESSAGES, OTHER]
FUNCTIONS: list[tuple[Any, str, str]] = [
    (PipelineTrainer, "step", OTHER),
    (Stage, "forward", WEIGHTS),
    (Stage, "backward", WEIGHTS),
    (WeightCopies, "in_current", WEIGHTS),
    (Criterion, "loss_for_backward", FORWARD),
    (torch.autograd, "backward", BACKWARD),
    (Stage, "update", UPDATE),
    (FlatWeightPredictor, "predict", PREDICTION),
    (StageP2P, "send", MESSAGES),
    (StageP2P, "recv", MESSAGES),
    (StageP2P, "barrier", MESSAGES),
    (Channel, "_wait", WAITING),
]


class Timers:
    """The seconds of functions by part, each function without the timed ones that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function whose time goes to a part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return run

    @contextmanager
    def installed(self, module: torch.nn.Module) -> Iterator[None]:
        places = [*FUNCTIONS, (module, "forward", FORWARD)]
        before = [getattr(owner, name) for owner, name, _ in places]
        for (owner, name, part), function in zip(places, before, strict=True):
            setattr(owner, name, self.timed(function, part))
        try:
            yield
        finally:
            for (owner, name, _), function in zip(places, before, strict=True):
                setattr(owner, name, function)

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


def measure(
    rank: int, system: OurSchedule, model: EncoderModel, num_microbatches: int, plan: Plan
) -> dict[str, list[float]]:
    """Return the seconds per microbatch of each part on this rank, by turn.

    A turn is a block of steps with timers, and one without.
    """
    training = system.start(model, num_microbatches)
    time_block(training, WARM_UP)
    steps = plan.steps(num_microbatches)
    turns: list[dict[str, float]] = []
    for _ in range(plan.turns):
        whole, timers = time_block(training, steps), Timers()
        with timers.installed(training.trainer.stages[0].module):
            time_block(training, steps, timers.seconds.clear)
        a_step = {part: seconds / steps for part, seconds in timers.seconds.items()}
        turns.append({**a_step, WHOLE: whole})
    scale = 1 / num_microbatches
    return {part: [scale * turn.get(part, 0.0) for turn in turns] for part in (*PARTS, WHOLE)}


def main() -> None:
    parser = make_parser("pipeline.parts", __doc__)
    parser.add_argument("--code", default="after", help="the name of the code in the rows")
    parser.add_argument("--optimizer", default=ADAMW, help="a class of AdamW, such as %(default)s")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    plan, model = Plan(8, 32), SMALL_MICROBATCHES
    if options.dry_run:
        plan = Plan(1, 2)
        model = EncoderModel(width=16, num_blocks=2, num_heads=2, microbatch=1, length=4)
    rows: list[Row] = []
    for system in (PIPE_OPTIM, ONE_FORWARD_ONE_BACKWARD):
        chosen = replace(system, optimizer=options.optimizer)
        for count in (2, 4, 8):
            ranks = run_on_loopback(2, 120, measure, chosen, model, count, plan)
            columns = {"code": options.code, "system": system.name, "microbatches": count}
            columns |= {"compute": model.name, "optimizer": options.optimizer}
            found = [
                {
                    **summary(times),
                    **columns,
                    "stage": stage,
                    "part": part,
                    "share": f"{statistics.median(times) / statistics.median(parts[WHOLE]):.3f}",
                }
                for stage, parts in enumerate(ranks)
                for part, times in parts.items()
            ]
            print(f"\n{system.name}, M = {count}; ms a microbatch and share, by stage")
            for pair in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
                cells = (f"{row['median_ms']:>9} {row['share']:>6}" for row in pair)
                print(f"{pair[0]['part']:<36}", *cells)
            rows += found
    save(rows, "pipeline-parts", FIELDS, options.out)


if __name__ == "__main__":
    main()
