"""The simulation of a run: seconds a step, bytes, waits, distances and goodput."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..compression import BufferLayout, Compressor, Piece
from ..gossip import ADPSGD, OSGP, SGP, AllReduce, DiLoCo, Hierarchical, LocalSGD, NoLoCo, SlowMo
from ..gossip.algorithms.base import Algorithm, Periodic
from ..gossip.topology.composed import InterNode
from ..training.arguments import check_integer, check_type, require
from .algorithms import Gradients, Nodes, Outer, Rounds, Steps, average_all, average_pairs
from .clock import Clock
from .conditions import Failures, Stragglers
from .cost import Cost, SingleRankCollectives
from .links import Links
from .objectives import Objective
from .pairs import Pairs
from .profile import Profile

_SAMPLED_RANKS, _SAMPLED_STEPS = 1000, 40
_CHECKED_RANKS = 1024  # beyond, it takes minutes to check that a topology connects all
_SIDE = 512  # of the matrix on which compressors are tried


@dataclass(frozen=True)
class SimulatedRun:
    """What a simulation has found.

    Args:
        seconds: a step takes, mean over ranks and steps, those of the start included; with
            ADPSGD, those of the run over the steps that the mean rank has taken.
        range: the 10th and the 90th percentile of a rank's step.
        waiting: of these seconds, those without computing, encoding or the optimizer's step.
        card_bytes: that a network card sends in a step, of the machine that sends most.
        goodput: share of time spent on steps that count; 1 without failures.
        times: (steps + 1, ranks) seconds at which a step has ended, of 1,000 ranks at most; with
            ADPSGD as many as the fastest has taken, NaN for others.
        steps: after which the following were taken, of the mean rank.
        mixing_errors: rms distance of random values from their mean, over the first.
        consensus_distances: the same of values that each rank changes in each step by a random
            number of variance 1.
        losses: of the mean of the ranks' parameters, minus the least one, of the shape of
            ``steps``; infinite or NaN once they diverge. None without an objective.
        parameters: (ranks, dimension) after the last step, divided by push-sum weights. None
            without an objective.
    """

    algorithm: Algorithm
    seconds: float
    range: tuple[float, float]
    waiting: float
    card_bytes: float
    goodput: float
    times: np.ndarray
    steps: np.ndarray
    mixing_errors: np.ndarray
    consensus_distances: np.ndarray
    losses: np.ndarray | None = None
    parameters: np.ndarray | None = None

    @property
    def consensus_distance(self) -> float:
        """Return the mean of consensus distances over the second half of the steps."""
        return float(self.consensus_distances[:-1][self.steps[:-1] >= self.steps[-1] // 2].mean())

    @property
    def loss(self) -> float | None:
        """Return the mean of losses over the last tenth of the steps."""
        if self.losses is None:
            return None
        return float(self.losses[self.steps >= 0.9 * self.steps[-1]].mean())


def simulate_run(
    algorithm: Algorithm,
    num_ranks: int,
    links: Links,
    profile: Profile,
    message_bytes: float,
    *,
    num_steps: int = 1000,
    stragglers: Stragglers | None = None,
    failures: Failures | None = None,
    seed: int = 0,
    cost: Cost | None = None,
    objective: Objective | None = None,
) -> SimulatedRun:
    """Simulate steps of a training run.

    Args:
        algorithm: of ``pyparallel.gossip``, but ``EASGD`` and those with a leader. A rank of
            ADPSGD takes fewer steps if it is slower, until all have taken ``num_steps`` on average.
        message_bytes: of the model, without compression, in float32.
        cost: measured, of averages over all ranks: of gradients with any compressor, or of weights
            with that of the outer steps. None: as the algorithm's compressor does on a matrix.
        objective: on which the ranks train, such as ``Quadratic(learning_rate=0.1)``, by plain SGD
            and the algorithm's own rules, but for compressors' errors. A fragment has every so
            many-th parameter.
    """
    stragglers = stragglers or Stragglers()
    for name, value in (("num_ranks", num_ranks), ("num_steps", num_steps)):
        check_integer(name, value)
    require(message_bytes > 0, "message_bytes must be greater than 0", message_bytes)
    stragglers.check_ranks(num_ranks)
    if problem := _find_problem(algorithm, num_ranks):
        raise ValueError(problem)
    parts = algorithm.num_fragments if isinstance(algorithm, Periodic) else 1
    if cost is not None:
        rule = "cost must come with AllReduce, LocalSGD or DiLoCo, which average over all ranks"
        require(isinstance(algorithm, AllReduce | LocalSGD | DiLoCo), rule, algorithm)
        profile = replace(profile, encoding=cost.coding / parts)
        message_bytes = cost.reduced_bytes(num_ranks)
    if objective is not None:
        check_type("objective", objective, Objective, "an object such as Quadratic(0.1)")
        rule = f"dimension must be at least the algorithm's number of fragments, {parts}"
        require(objective.dimension >= parts, rule, objective.dimension)
    is_biased = getattr(getattr(algorithm, "inner", algorithm), "biased", False)
    clock = Clock(
        num_ranks, links, profile, stragglers, seed, max(2, parts), objective, is_biased=is_biased
    )
    sampled = np.unique(np.linspace(0, num_ranks - 1, _SAMPLED_RANKS).astype(int))
    seen = _sample_steps(num_steps, seed)
    with np.errstate(over="ignore", invalid="ignore"):  # of a loss that diverges
        if isinstance(algorithm, ADPSGD):
            times, measured = _run_pairs(Pairs(clock, algorithm, message_bytes), sampled, seen)
        else:
            steps = _steps_of(algorithm, clock, message_bytes, cost)
            times, measured = _run(steps, sampled, seen)
    low, high = np.nanquantile(np.diff(times, axis=0), (0.1, 0.9))
    errors, changing, *losses = np.array(measured).T
    goodput = 1.0
    if failures is not None:
        goodput = failures.goodput(
            len(clock.card_bytes),
            by_gossip=isinstance(algorithm, SGP | OSGP | ADPSGD | Hierarchical | NoLoCo),
            has_learners=isinstance(algorithm, Periodic),
        )
    return SimulatedRun(
        algorithm,
        float(clock.now.mean()) / num_steps,
        (float(low), float(high)),
        float(clock.waited.mean()) / num_steps,
        float(clock.card_bytes.max()) / num_steps,
        goodput,
        times,
        seen,
        errors / max(errors[0], np.finfo(float).tiny),
        changing,
        losses[0] if losses else None,
        None if clock.training is None else clock.training.z,
    )


def _run(
    steps: Steps, sampled: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, list[list[float]]]:
    """Run the steps of all ranks; return when sampled ranks have ended them, and measures."""
    clock = steps.clock
    times, measured = [np.zeros(len(sampled))], [clock.measure()]
    for step in range(1, seen[-1] + 1):
        clock.compute()
        steps.before_update()
        clock.update()
        steps.after_update()
        if step == seen[-1]:
            steps.flush()
        times.append(clock.now[sampled])
        if step in seen:
            measured.append(clock.measure())
    return np.array(times), measured


def _run_pairs(
    pairs: Pairs, sampled: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, list[list[float]]]:
    """Run as many steps of all ranks together; return when sampled ranks have ended them."""
    clock = pairs.clock
    measured = [clock.measure()]
    num_steps = int(seen[-1])
    measured += [clock.measure(pairs.merged()) for k in pairs.run(num_steps) if k in seen]
    clock.values[:] = pairs.merged()
    return pairs.times(sampled), measured


def _sample_steps(num_steps: int, seed: int) -> np.ndarray:
    """Return steps at random, so that they do not keep time with outer steps; and the last."""
    ends = np.unique(np.linspace(0, num_steps, _SAMPLED_STEPS + 1).astype(int))
    inner = np.random.default_rng(seed).integers(ends[:-1] + 1, ends[1:], endpoint=True)
    return np.unique([0, *inner, num_steps])


def _find_problem(algorithm: Algorithm, num_ranks: int) -> str | None:
    inner = algorithm.inner if isinstance(algorithm, SlowMo | Hierarchical) else None
    simulated = AllReduce, SGP, OSGP, ADPSGD, LocalSGD, DiLoCo, NoLoCo, SlowMo, Hierarchical
    if not isinstance(algorithm, simulated) or not isinstance(inner, SGP | OSGP | None):
        names = ", ".join(each.__name__ for each in simulated)
        return (
            f"algorithm must be one of {names}, or an SGP or OSGP in one of the last two, got "
            f"{algorithm!r}: others are not simulated"
        )
    topology = getattr(inner or algorithm, "topology", None)
    if topology is None or topology.num_ranks <= _CHECKED_RANKS:
        return algorithm.validation_error(num_ranks)
    nodes = num_ranks / getattr(algorithm, "ranks_per_node", 1)
    fits = topology.num_ranks == nodes
    return None if fits else f"topology must be for {nodes:g} ranks, got {topology!r}"


def _steps_of(
    algorithm: Algorithm, clock: Clock, message_bytes: float, cost: Cost | None = None
) -> Steps:
    n = clock.num_ranks
    if isinstance(algorithm, AllReduce):
        return Gradients(clock, message_bytes, n, cost)
    if isinstance(algorithm, SGP):
        sent = message_bytes * _gossip_ratio(algorithm.compressor)
        encodes = algorithm.compressor is not None
        return Rounds(clock, algorithm.topology, sent, algorithm.overlap, encodes=encodes)
    if isinstance(algorithm, OSGP):
        options = algorithm.topology, message_bytes, algorithm.delay
        return Rounds(clock, *options, merges_after=True)
    if isinstance(algorithm, Hierarchical):
        group = algorithm.ranks_per_node
        assert isinstance(algorithm.inner, SGP | OSGP)
        between = replace(algorithm.inner, topology=InterNode(n, algorithm.inner.topology))
        return Nodes(clock, message_bytes, group, _steps_of(between, clock, message_bytes / group))
    assert isinstance(algorithm, LocalSGD | DiLoCo | NoLoCo | SlowMo)
    inner = Steps(clock)
    if isinstance(algorithm, SlowMo) and algorithm.inner is not None:
        inner = _steps_of(algorithm.inner, clock, message_bytes)
    part, compressor = message_bytes / algorithm.num_fragments, algorithm.compressor
    if isinstance(algorithm, NoLoCo):
        ratio = _gossip_ratio(compressor)
        if compressor is not None:
            ratio += 1 / algorithm.pull_turns
        average = average_pairs(clock, part * ratio, algorithm.topology)
    elif cost is None:
        average = average_all(clock, part * _collective_ratio(compressor, n))
    else:
        average = average_all(clock, part, cost.collectives / algorithm.num_fragments)
    return Outer(clock, algorithm, algorithm.interval, inner, average)


def _tried() -> tuple[torch.Tensor, BufferLayout]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SIDE * _SIDE, generator=generator, device="cpu")
    return x, BufferLayout((Piece("layer.weight", (_SIDE, _SIDE)),))


def _gossip_ratio(compressor: Compressor | None) -> float:
    """Return the bytes of a message over those in float32."""
    if compressor is None:
        return 1.0
    x, layout = _tried()
    message = compressor.compress(x, compressor.init(layout, x.device))
    return sum(part.numel() * part.element_size() for part in message) / x.nbytes


def _collective_ratio(compressor: Compressor | None, num_ranks: int) -> float:
    """Return the float32 fraction whose ring all-reduce sends as much as the compressor's mean.

    A rank sends ``a (n - 1) + b (n - 1) / n`` bytes: its message to all others, or parts of sums.
    """
    if compressor is None or num_ranks == 1:
        return 1.0
    of_two, of_four = (_sent_bytes(compressor, size) for size in (2, 4))
    b = (3 * of_two - of_four) / 0.75
    a = of_two - b / 2
    sent = a * (num_ranks - 1) + b * (num_ranks - 1) / num_ranks
    return sent * num_ranks / (2 * (num_ranks - 1)) / (4 * _SIDE * _SIDE)


def _sent_bytes(compressor: Compressor, num_ranks: int) -> float:
    x, layout = _tried()
    collectives = SingleRankCollectives(num_ranks)
    compressor.mean_(x, compressor.init(layout, x.device), collectives)
    return collectives.stats.wire_bytes
