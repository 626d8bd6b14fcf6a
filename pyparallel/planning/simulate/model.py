"""The simulation of a run: seconds a step, bytes, waits, distances and goodput."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from ...gossip import ADPSGD, OSGP, SGP, AllReduce, DiLoCo, Hierarchical, LocalSGD, NoLoCo, SlowMo
from ...gossip.topology.composed import InterNode
from ...pipeline import GPipe
from ...pipeline.replicas import place_of_replicas
from ...training import Algorithm, Place
from ...training.arguments import check_integer, check_type, raise_problem, require
from .algorithms import Gradients, Nodes, Outer, Rounds, Steps, average_all, average_pairs
from .clock import BUCKET_BYTES, Clock
from .conditions import Failures, Stragglers
from .cost import Cost, collective_ratio, gossip_ratio
from .links import Links
from .objectives import Objective
from .pairs import Pairs
from .pipelines import Pipeline, Pipelines
from .profile import Profile

_SAMPLED_RANKS, _SAMPLED_STEPS = 1000, 40
_CHECKED_RANKS = 1024  # beyond, it takes minutes to check that a topology connects all


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
        consensus_distances: the same of values that each rank changes in each update by a random
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
    pipeline: Pipeline | None = None,
    cost: Cost | None = None,
    objective: Objective | None = None,
) -> SimulatedRun:
    """Simulate steps of a training run.

    With a pipeline a rank's step ends with the update of its last microbatch, and the run when all
    stages have ended. As in its trainer an algorithm takes a step with each update of a stage, and
    gradients are averaged whole after the backwards, for ``AllReduce()`` once all stages of all
    replicas have them. With one stage this is all that differs from a run without a pipeline, where
    buckets of gradients are averaged during backward.

    Args:
        algorithm: of ``pyparallel.gossip``, but ``EASGD`` and those with a leader. A rank of
            ADPSGD takes fewer steps if it is slower, until all have taken ``num_steps`` on average.
            With a pipeline it is of the replicas, and not ADPSGD.
        profile: of the whole model on one rank.
        message_bytes: of the whole model, without compression, in float32.
        pipeline: of which the ranks hold replicas; None: each rank holds the model.
        cost: measured, of averages over all ranks: of gradients with any compressor, or of weights
            with that of the outer steps. None: as the algorithm's compressor does on a matrix. Not
            with a pipeline.
        objective: on which the ranks train, such as ``Quadratic(learning_rate=0.1)``, by plain SGD
            and the algorithm's own rules, but for compressors' errors. A fragment has every so
            many-th parameter. Not with a pipeline.
    """
    stragglers = stragglers or Stragglers()
    for name, value in (("num_ranks", num_ranks), ("num_steps", num_steps)):
        check_integer(name, value)
    require(message_bytes > 0, "message_bytes must be greater than 0", message_bytes)
    stragglers.check_ranks(num_ranks)
    num_stages = 1 if pipeline is None else pipeline.num_stages
    algorithm = algorithm.bind(max(1, num_ranks // num_stages))
    raise_problem(_find_problem(algorithm, num_ranks, pipeline))
    _check_options(algorithm, pipeline, cost, objective)
    if cost is not None:
        profile = replace(profile, encoding=cost.coding / _count_parts(algorithm))
        message_bytes = cost.reduced_bytes(num_ranks)
    computing = profile.computing * links.computing(num_ranks)
    for rank, factor in stragglers.slow.items():
        computing[rank] *= factor
    of_rank = pipeline or Pipeline(GPipe(), 1, 1)
    in_flight = 2 + of_rank.num_stages // of_rank.num_microbatches  # steps
    draw = lru_cache(in_flight)(partial(stragglers.draw, computing, seed))
    clocks = _build_clocks(num_ranks, links, profile, draw, seed, algorithm, pipeline, objective)
    sampled = np.unique(np.linspace(0, num_ranks - 1, _SAMPLED_RANKS).astype(int))
    seen = _sample_steps(num_steps, seed)
    with np.errstate(over="ignore", invalid="ignore"):  # of a loss that diverges
        if isinstance(algorithm, ADPSGD):
            times, measured = _run_pairs(Pairs(clocks[0], algorithm, message_bytes), sampled, seen)
        else:
            part = message_bytes / len(clocks)
            stages = [_steps_of(algorithm, each, part, cost) for each in clocks]
            progress = Pipelines(of_rank, stages, profile.forward_share).run(num_steps)
            times, measured = _record(progress, clocks, sampled, seen)
    low, high = np.nanquantile(np.diff(times, axis=0), (0.1, 0.9))
    errors, changing = np.sqrt((measured[:, :, :2] ** 2).mean(1)).T
    training = clocks[0].training
    goodput = 1.0
    if failures is not None:
        goodput = failures.goodput(
            len(clocks[0].card_bytes),
            by_gossip=not algorithm.averages_over_all and pipeline is None,
            has_learners=algorithm.takes_outer_steps and pipeline is None,
        )
    return SimulatedRun(
        algorithm,
        float(np.mean([clock.now for clock in clocks])) / num_steps,
        (float(low), float(high)),
        float(np.mean([clock.waited for clock in clocks])) / num_steps,
        float(np.sum([clock.card_bytes for clock in clocks], axis=0).max()) / num_steps,
        goodput,
        times,
        seen,
        errors / max(errors[0], np.finfo(float).tiny),
        changing,
        None if training is None else measured[:, 0, 2],
        None if training is None else training.z,
    )


def _count_parts(algorithm: Algorithm) -> int:
    """Return how many fragments are averaged one after the other."""
    return getattr(algorithm, "num_fragments", 1)


def _check_options(
    algorithm: Algorithm, pipeline: Pipeline | None, cost: Cost | None, objective: Objective | None
) -> None:
    for name, given in (("cost", cost), ("objective", objective)):
        fits = pipeline is None or given is None
        require(fits, f"{name} must come without a pipeline", repr(pipeline))
    if cost is not None:
        rule = "cost must come with AllReduce, LocalSGD or DiLoCo, which average over all ranks"
        averages_alone = algorithm.averages_over_all and not isinstance(algorithm, SlowMo)
        require(averages_alone, rule, algorithm)
    if objective is not None:
        check_type("objective", objective, Objective, "an object such as Quadratic(0.1)")
        parts = _count_parts(algorithm)
        rule = f"dimension must be at least the algorithm's number of fragments, {parts}"
        require(objective.dimension >= parts, rule, objective.dimension)


def _build_clocks(
    num_ranks: int, links: Links, profile: Profile, draw: Callable[[int], np.ndarray], seed: int,
    algorithm: Algorithm, pipeline: Pipeline | None, objective: Objective | None,
) -> list[Clock]:  # fmt: skip
    """Return a clock of the ranks of each stage; without a pipeline there is one."""
    columns = max(2, _count_parts(algorithm))
    is_biased = getattr(getattr(algorithm, "inner", algorithm), "biased", False)
    count, bucket_bytes = (1, BUCKET_BYTES) if pipeline is None else (pipeline.num_stages, math.inf)
    encoding, stepping = profile.encoding / count, profile.stepping / count
    part = replace(profile, encoding=encoding, stepping=stepping)
    options = links, part, draw, seed, columns, bucket_bytes, objective
    return [
        Clock(range(stage, num_ranks, count), *options, is_biased=is_biased)
        for stage in range(count)
    ]


def _record(
    progress: Iterator[tuple[int, int]], clocks: Sequence[Clock], sampled: np.ndarray,
    seen: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return when sampled ranks have ended each step, and measures after steps, (s, stages, m)."""
    times = np.zeros((seen[-1] + 1, len(sampled)))
    measured = np.array([[clock.measure() for clock in clocks]] * len(seen))
    replicas, stages = np.divmod(sampled, len(clocks))
    for stage, step in progress:
        own = stages == stage
        times[step, own] = clocks[stage].now[replicas[own]]
        if step in seen:
            measured[seen == step, stage] = clocks[stage].measure()
    return times, measured


def _run_pairs(
    pairs: Pairs, sampled: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Run as many steps of all ranks together; return the same of them."""
    clock = pairs.clock
    measured = [clock.measure()]
    num_steps = int(seen[-1])
    measured += [clock.measure(pairs.merged()) for k in pairs.run(num_steps) if k in seen]
    clock.values[:] = pairs.merged()
    return pairs.times(sampled), np.array(measured)[:, None]


def _sample_steps(num_steps: int, seed: int) -> np.ndarray:
    """Return steps at random, so that they do not keep time with outer steps; and the last."""
    ends = np.unique(np.linspace(0, num_steps, _SAMPLED_STEPS + 1).astype(int))
    inner = np.random.default_rng(seed).integers(ends[:-1] + 1, ends[1:], endpoint=True)
    return np.unique([0, *inner, num_steps])


def _find_problem(algorithm: Algorithm, num_ranks: int, pipeline: Pipeline | None) -> str | None:
    inner = getattr(algorithm, "inner", None)
    simulated: tuple[type[Algorithm], ...] = AllReduce, SGP, OSGP, LocalSGD, DiLoCo, NoLoCo
    simulated += (SlowMo, Hierarchical) if pipeline else (ADPSGD, SlowMo, Hierarchical)
    if not isinstance(algorithm, simulated) or not isinstance(inner, SGP | OSGP | None):
        names = ", ".join(each.__name__ for each in simulated)
        return (
            f"algorithm must be one of {names}, or an SGP or OSGP in one of the last two, got "
            f"{algorithm!r}: others are not simulated" + (" with a pipeline" if pipeline else "")
        )
    if pipeline is not None:
        if num_ranks % pipeline.num_stages:
            return f"num_ranks must be a multiple of {pipeline.num_stages} stages, got {num_ranks}"
        num_ranks //= pipeline.num_stages
    topology = getattr(inner or algorithm, "topology", None)
    if topology is None or topology.num_ranks <= _CHECKED_RANKS:
        if pipeline is None:
            return algorithm.error_at(Place(num_ranks))
        return algorithm.error_at(place_of_replicas(pipeline.schedule, num_ranks))
    nodes = num_ranks / getattr(algorithm, "ranks_per_node", 1)
    fits = topology.num_ranks == nodes
    return None if fits else f"topology must be for {nodes:g} ranks, got {topology!r}"


def _steps_of(
    algorithm: Algorithm, clock: Clock, message_bytes: float, cost: Cost | None = None
) -> Steps:
    n = clock.num_ranks
    if algorithm.averages_gradients:
        return Gradients(clock, message_bytes, n, cost)
    if isinstance(algorithm, SGP | OSGP):
        sent = message_bytes * gossip_ratio(algorithm.compressor)
        encodes, merges_after = algorithm.compressor is not None, algorithm.merges_after_update
        options = algorithm.bound_topology, sent, algorithm.overlap
        return Rounds(clock, *options, encodes=encodes, merges_after=merges_after)
    if isinstance(algorithm, Hierarchical):
        group = algorithm.ranks_per_node
        assert isinstance(algorithm.inner, SGP | OSGP)
        between = replace(algorithm.inner, topology=InterNode(n, algorithm.inner.bound_topology))
        return Nodes(clock, message_bytes, group, _steps_of(between, clock, message_bytes / group))
    assert isinstance(algorithm, LocalSGD | DiLoCo | NoLoCo | SlowMo)
    inner = Steps(clock)
    if isinstance(algorithm, SlowMo) and algorithm.inner is not None:
        inner = _steps_of(algorithm.inner, clock, message_bytes)
    part, compressor = message_bytes / algorithm.num_fragments, algorithm.compressor
    if isinstance(algorithm, NoLoCo):
        ratio = gossip_ratio(compressor)
        if compressor is not None:
            ratio += 1 / algorithm.pull_turns
        average = average_pairs(clock, part * ratio, algorithm.bound_topology)
    elif cost is None:
        average = average_all(clock, part * collective_ratio(compressor, n))
    else:
        average = average_all(clock, part, cost.collectives / algorithm.num_fragments)
    return Outer(clock, algorithm, algorithm.interval, inner, average)
