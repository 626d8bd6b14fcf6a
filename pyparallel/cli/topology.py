"""``python -m pyparallel topology``: the cost and mixing rate of one topology, or of all."""

import argparse
import importlib
import importlib.util
import inspect
import math
from pathlib import Path

import numpy as np

from ..gossip import OSGP, SGP, stability_limit, topology
from ..gossip.topology import Circulant, Lazy, Topology, mixing_curve, spectral_gap
from .text_table import aligned

EXAMPLE = "python -m pyparallel topology OnePeerExponential --ranks 16"

_CONSENSUS = 1e-9  # of the initial disagreement: practically exact
_MOST_COMPARED = 256  # ranks; beyond, dense topologies take minutes
_MOST_ANALYZED = 32  # ranks of a topology that is not circulant, for the stable learning rates
_DELAYS = (1, 2, 4)
_COLUMNS = (
    "topology", "degree", "period", "consensus", "spectral gap", "MB per step",
    "of all-reduce",
)  # fmt: skip
_LEGEND = f"""
degree         messages that a rank sends in a round, at most
period         rounds until the graphs repeat
consensus      rounds until disagreement is below {_CONSENSUS:g} of the first
spectral gap   per round; 1: exact averages after finitely many rounds
MB per step    that a rank sends, mean over ranks and rounds
of all-reduce  the same, over what a rank sends in a ring all-reduce"""
_NOT_COMPARED = {"HierarchicalTopology": "depends on ranks_per_node"}


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
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return not inspect.isabstract(kind) and required == ["num_ranks"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    names = sorted(find_kinds())
    parser.add_argument("name", nargs="?", choices=names, metavar="NAME",
                        help=f"{', '.join(names)} (default: a table of all)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=8, help="(default: 8)")
    parser.add_argument(
        "--peers",
        type=int,
        help="messages per round, for a NAME with this option (default: the topology's)",
    )
    parser.add_argument(
        "--lazy", type=float, metavar="GAMMA", help="factor of the shares: Lazy(NAME, GAMMA)"
    )
    parser.add_argument(
        "--momentum", type=float, help="of SGD, for the stable learning rates (default: 0.9)"
    )
    parser.add_argument(
        "--parameters", type=float, default=25e6, help="of the model, in float32 (default: 25e6)"
    )
    parser.add_argument(
        "--out", type=Path, help="file for the picture of NAME (default: NAME-RANKS.png)"
    )


def report(arguments: argparse.Namespace) -> str:
    """Return a topology's properties, and draw its graphs and mixing curve; or a table of all."""
    if arguments.name is None:
        for option in ("peers", "lazy", "momentum", "out"):
            if (given := getattr(arguments, option)) is not None:
                raise SystemExit(f"topology: --{option} must come with a NAME, got {given} alone")
        return compare(arguments.ranks, 4 * arguments.parameters)
    kind = find_kinds()[arguments.name]
    options = {} if arguments.peers is None else {"peers": arguments.peers}
    if options and "peers" not in inspect.signature(kind).parameters:
        raise SystemExit(f"topology: {arguments.name} takes no peers, got {arguments.peers}")
    try:
        chosen = kind(arguments.ranks, **options)
        if arguments.lazy is not None:
            chosen = Lazy(chosen, arguments.lazy)
        momentum = 0.9 if arguments.momentum is None else arguments.momentum
        limits = _limits(chosen, momentum)
    except ValueError as error:
        raise SystemExit(f"topology: {error}") from error
    curve = mixing_curve(chosen, _rounds_to_show(chosen))
    path = arguments.out or Path(f"{arguments.name}-{arguments.ranks}.png")
    lines = describe(chosen, curve, 4 * arguments.parameters) + limits
    lines.append(("picture", _draw(chosen, curve, path)))
    return "\n".join(f"{label:<45} {value}".rstrip() for label, value in lines)


def _limits(chosen: Topology, momentum: float) -> list[tuple[str, str]]:
    """Return the largest stable lr * L of each order and delay, without and with momentum."""
    head = f"stable lr * L, momentum 0 and {momentum:g}"
    most = _MOST_COMPARED if isinstance(chosen, Circulant) else _MOST_ANALYZED
    if chosen.num_ranks > most:
        return [(head, f"not computed for more than {most} ranks")]
    algorithms: list[tuple[str, SGP | OSGP]] = [("SGP", SGP(chosen))]
    algorithms += [(f"SGP, overlap={tau}", SGP(chosen, overlap=tau)) for tau in _DELAYS]
    algorithms += [(f"OSGP, delay={tau}", OSGP(chosen, tau)) for tau in _DELAYS]
    lines = [(head, "")]
    for name, algorithm in algorithms:
        both = [stability_limit(algorithm, momentum=each) for each in (0.0, momentum)]
        lines.append((f"  {name}", ", ".join(f"{limit:.2f}" for limit in both)))
    return lines


def compare(num_ranks: int, num_bytes: float) -> str:
    """Return the table of all topologies, those that send least first."""
    if not 1 <= num_ranks <= _MOST_COMPARED:
        raise SystemExit(
            f"topology: --ranks must be from 1 to {_MOST_COMPARED} without a NAME, got {num_ranks}"
        )
    rows, unfit = [], []
    for name, kind in find_kinds().items():
        if name in _NOT_COMPARED:
            unfit.append(f"{name}: {_NOT_COMPARED[name]}")
            continue
        try:
            chosen = kind(num_ranks)
        except ValueError as error:
            unfit.append(f"{name}: {error}")
            continue
        curve, sent = mixing_curve(chosen, _rounds_to_show(chosen)), _messages_per_step(chosen)
        row = (
            name,
            f"{chosen.degree:,}",
            f"{chosen.period:,}",
            _rounds_to_consensus(curve),
            f"{spectral_gap(chosen):.3g}",
            f"{sent * num_bytes / 1e6:,.1f}",
            f"{sent / _ring_all_reduce(num_ranks):.2f}",
        )
        rows.append((sent, np.sum(curve >= _CONSENSUS), row))
    table = [row for *_, row in sorted(rows)]
    left_out = ["", "not in the table", *(f"  {each}" for each in unfit)]
    head = f"{num_ranks} ranks, a model of {num_bytes / 1e6:,.1f} MB"
    return "\n".join([head, "", *aligned([_COLUMNS, *table]), _LEGEND, *left_out])


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
    sent = _messages_per_step(chosen)
    return [
        ("topology", repr(chosen)),
        ("rounds until the graphs repeat (period)", f"{chosen.period:,}"),
        ("messages per rank and round, at most (degree)", f"{chosen.degree:,}"),
        ("push-sum weights stay 1 (regular)", "yes" if chosen.regular else "no, PushSum corrects"),
        ("spectral gap per round", f"{spectral_gap(chosen):.3g}"),
        (f"rounds until disagreement is below {_CONSENSUS:g}", _rounds_to_consensus(curve)),
        ("sent per step and rank, mean", f"{sent * num_bytes / 1e6:,.1f} MB"),
        ("of ring all-reduce", f"{sent / _ring_all_reduce(chosen.num_ranks):.2f}"),
    ]


def _rounds_to_consensus(curve: np.ndarray) -> str:
    exact = np.flatnonzero(curve < _CONSENSUS)
    return f"{exact[0]:,}" if len(exact) else f"more than {len(curve) - 1:,}"


def _messages_per_step(chosen: Topology) -> float:
    """Return how many messages a rank sends in a step, mean over ranks and rounds."""
    ranks = range(0, chosen.num_ranks, max(1, chosen.num_ranks // 200))
    sent = [len(chosen.out_peers(rank, i)) for i in range(chosen.period) for rank in ranks]
    return float(np.mean(sent))


def _ring_all_reduce(num_ranks: int) -> float:
    """Return what a rank sends in a ring all-reduce, in messages of the model's size."""
    return max(2 * (num_ranks - 1) / num_ranks, 1e-9)
