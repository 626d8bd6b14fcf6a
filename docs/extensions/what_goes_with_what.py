"""Print the tables of the page ``docs/reference/what_goes_with_what.md``, from the code."""

import inspect
import sys
from collections.abc import Callable, Iterable

from pyparallel import compression, gossip, pipeline
from pyparallel.compression import AttachPoint, Int8, TopK
from pyparallel.gossip import SGP, AllReduce
from pyparallel.pipeline.replicas import place_of_replicas
from pyparallel.pipeline.schedules import EVERY_SCHEDULE
from pyparallel.pipeline.schedules.schedule import find_option_error
from pyparallel.training import Place

RANKS = 4
NEEDED = {  # arguments without a default
    "AsynchronousLeaderSGD": "2",
    "ErrorFeedback": "TopK(0.01)",
    "Chain": "TopK(0.01), Int8()",
    "DGC": "0.001",
    "Hierarchical": "SGP(), 2",
    "LeaderSGD": "2",
    "LocalSGD": "100",
    "PerParameter": '{"*": Int8()}',
    "SlowMo": "SGP(), 100",
    "Switch": "{0: TopK(0.01), 1000: Int8()}",
    "Threshold": "0.1",
    "TopK": "0.01",
    "RandomK": "0.01",
}
PLACES = {
    "ranks that stay": Place(RANKS),
    "`membership=`": Place(RANKS, has_members=True),
    "shards, `mesh=`": Place(RANKS, is_sharded=True),
    "inner of another": Place(RANKS, is_inner=True),
    "replicas, a schedule that flushes": place_of_replicas(pipeline.GPipe(), RANKS),
    "replicas, one that does not": place_of_replicas(pipeline.PipeOptim(), RANKS),
}
OPTIONS = "gradient_accumulation_steps", "grad_scaler", "max_norm", "correction"
LAYERS = "tied weights", "skip connections"
EXAMPLES = {"SGP": SGP, "Int8": Int8, "TopK": TopK}


def _examples(package: object, base: type) -> dict[str, object]:
    """Return an object of each public class, or of its constructor, by its call."""
    found = {}
    for name in sorted(package.__all__):
        call = f"{name}({NEEDED.get(name, '')})"
        if callable(kind := getattr(package, name)) and kind is not base:
            made = eval(call, {name: kind, **EXAMPLES}) if _makes(kind, base) else None
            found |= {f"`{call}`": made} if isinstance(made, base) else {}
    return found


def _makes(kind: Callable, base: type) -> bool:
    if isinstance(kind, type):
        return issubclass(kind, base) and not inspect.isabstract(kind)
    return kind.__name__[0].isupper()


def _table(columns: Iterable[str], rows: dict[str, list[object]]) -> str:
    """Return a table whose cells are "yes", or "no" where there is an error."""
    head = ["with", *columns]
    lines = [head, ["---"] * len(head)]
    lines += [[n, *("no" if each else "yes" for each in errors)] for n, errors in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def algorithms() -> str:
    """Return the table of algorithms and places."""
    made = _examples(gossip.algorithms, gossip.Algorithm)
    bound = {name: each.bind(RANKS) for name, each in made.items()}
    places = PLACES.values()
    return _table(PLACES, {name: [*map(each.error_at, places)] for name, each in bound.items()})


def schedules() -> str:
    """Return the table of schedules, how replicas are averaged, and options."""
    examples = {type(each).__name__: each for each in reversed(EVERY_SCHEDULE)}
    examples["Interlocking"] = pipeline.Interlocking(2, pipeline.LinearHead(10))
    averages = [AllReduce(), SGP().bind(RANKS)]
    columns = ["`replicas=AllReduce()`", "`replicas=SGP()`", *(f"`{each}=`" for each in OPTIONS)]
    rows = {
        f"`{name}`": [
            *(average.error_at(place_of_replicas(schedule, RANKS)) for average in averages),
            *(find_option_error(schedule, each) for each in (*OPTIONS, *LAYERS)),
        ]
        for name, schedule in sorted(examples.items())
    }
    return _table([*columns, *LAYERS], rows)


def compressors() -> str:
    """Return the table of compressors and where they are attached."""
    made = _examples(compression, compression.Compressor)
    rows = {name: list(map(each.error_at, AttachPoint)) for name, each in made.items()}
    return _table([each.value for each in AttachPoint], rows)


if __name__ == "__main__":
    sys.stdout.write("\n\n".join([algorithms(), schedules(), compressors(), ""]))
