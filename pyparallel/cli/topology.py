"""``python -m pyparallel topology NAME --ranks N``: a topology's cost and mixing rate."""

import argparse
import importlib
import importlib.util
import inspect
import math
from pathlib import Path

import numpy as np

from ..gossip import topology
from ..gossip.topology import Topology, mixing_curve, spectral_gap

_CONSENSUS = 1e-9  # of the initial disagreement: practically exact


def find_kinds() -> dict[str, type[Topology]]:
    """Return the topologies that need only a number of ranks, by name."""
    public = {name: getattr(topology, name) for name in topology.__all__}
    return {
        name: kind
        for name, kind in public.items()
        if inspect.isclass(kind) and issubclass(kind, Topology) and _needs_ranks_alone(kind)
    }


def _needs_ranks_alone(kind: type[Topology]) -> bool:
    parameters = list(inspect.signature(kind).parameters.values())
    required = [each.name for each in parameters if each.default is each.empty]
    return not inspect.isabstract(kind) and required == ["num_ranks"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", choices=sorted(find_kinds()), metavar="NAME",
                        help=", ".join(sorted(find_kinds())))  # fmt: skip
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument(
        "--peers", type=int, help="messages per round, for topologies with this option"
    )
    parser.add_argument("--parameters", type=float, default=25e6, help="of the model, in float32")
    parser.add_argument("--out", type=Path, help="file for the picture (default: NAME-N.png)")


def report(arguments: argparse.Namespace) -> str:
    """Return the properties of a topology as a table; draw its graphs and mixing curve."""
    kind = find_kinds()[arguments.name]
    options = {} if arguments.peers is None else {"peers": arguments.peers}
    if options and "peers" not in inspect.signature(kind).parameters:
        raise SystemExit(f"topology: {arguments.name} takes no peers, got {arguments.peers}")
    try:
        chosen = kind(arguments.ranks, **options)
    except ValueError as error:
        raise SystemExit(f"topology: {error}") from error
    curve = mixing_curve(chosen, _rounds_to_show(chosen))
    path = arguments.out or Path(f"{arguments.name}-{arguments.ranks}.png")
    lines = describe(chosen, curve, 4 * arguments.parameters)
    lines.append(("picture", _draw(chosen, curve, path)))
    return "\n".join(f"{label:<45} {value}" for label, value in lines)


def _draw(chosen: Topology, curve: np.ndarray, path: Path) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "none: matplotlib is not installed"
    importlib.import_module("pyparallel.cli.topology_picture").draw(chosen, curve, path)
    return str(path)


def _rounds_to_show(chosen: Topology) -> int:
    gap = spectral_gap(chosen)
    needed = chosen.period if gap > 1 - 1e-9 else math.ceil(-math.log(_CONSENSUS) / gap)
    return max(2, min(2 * max(needed, 2), 500))


def describe(chosen: Topology, curve: np.ndarray, num_bytes: float) -> list[tuple[str, str]]:
    """Return names and values of a topology's properties; a message has ``num_bytes``."""
    places = range(chosen.period)
    ranks = range(0, chosen.num_ranks, max(1, chosen.num_ranks // 200))
    sent = [np.mean([len(chosen.out_peers(rank, i)) for i in places]) for rank in ranks]
    exact = np.flatnonzero(curve < _CONSENSUS)
    return [
        ("topology", repr(chosen)),
        ("rounds until the graphs repeat (period)", f"{chosen.period:,}"),
        ("messages per rank and round, at most (degree)", f"{chosen.degree:,}"),
        ("push-sum weights stay 1 (regular)", "yes" if chosen.regular else "no, PushSum corrects"),
        ("spectral gap per round", f"{spectral_gap(chosen):.3g}"),
        (
            f"rounds until disagreement is below {_CONSENSUS:g}",
            f"{exact[0]:,}" if len(exact) else f"more than {len(curve) - 1:,}",
        ),
        ("sent per step and rank, mean", f"{np.mean(sent) * num_bytes / 1e6:,.1f} MB"),
        (
            "of ring all-reduce",
            f"{np.mean(sent) / _ring_all_reduce(chosen.num_ranks):.2f}",
        ),
    ]


def _ring_all_reduce(num_ranks: int) -> float:
    """Return what a rank sends in a ring all-reduce, in messages of the model's size."""
    return max(2 * (num_ranks - 1) / num_ranks, 1e-9)
