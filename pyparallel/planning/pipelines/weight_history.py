"""The weight versions that actions read under a policy, with their staleness and copies."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from ...pipeline.schedules.action import Kind
from ...pipeline.schedules.versions import Count, VersionCounters, Versions
from .action_table import ActionTable

_READ_BY_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_APPLIED = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, eq=False)
class WeightHistory:
    """The weights that each row of a table reads, in updates of its stage since a flush."""

    version: np.ndarray  # (n,) int64, which the row reads
    horizon: np.ndarray  # (n,) int64, how many updates ahead of it the weights are predicted
    # (n,) int64, how many updates older the version is than the one that training without a
    # pipeline would have read; the horizon that an exact prediction needs.
    staleness: np.ndarray
    copies: np.ndarray  # (num_stages,) int64, the most weights held, the live ones included


def trace_versions(table: ActionTable, versions: Versions) -> WeightHistory:
    """Apply the policy to the actions of all stages; a ValueError if a version does not exist."""
    version, horizon, staleness = (np.zeros(len(table.rows), np.int64) for _ in range(3))
    copies = np.ones(table.num_stages, np.int64)
    for stage, rows in enumerate(table.stage_rows()):
        kinds, microbatches = table.rows[rows, 1], table.rows[rows, 2]
        live = np.cumsum(kinds == Kind.UPDATE) - (kinds == Kind.UPDATE)
        counters = _version_counters(kinds, microbatches, live)
        forward, backward = versions.forward(counters, stage), versions.backward(counters, stage)
        # An update reads the live weights, which are never stale.
        choose = partial(_choose, kinds, microbatches)
        version[rows] = choose(forward.version, backward.version, live)
        horizon[rows] = choose(forward.horizon, backward.horizon, 0)
        staleness[rows] = choose(counters.update, counters.update, live) - version[rows]
        _check_existence(version[rows], live, stage, versions)
        copies[stage] = 1 + _most_copies_beside(version[rows], horizon[rows], live)
    return WeightHistory(version, horizon, staleness, copies)


def _version_counters(
    kinds: np.ndarray, microbatches: np.ndarray, live: np.ndarray
) -> VersionCounters:
    def at(*which: Kind) -> np.ndarray:
        chosen = np.isin(kinds, which)
        times = np.zeros(microbatches.max() + 1, dtype=np.int64)
        times[microbatches[chosen]] = live[chosen]
        return times

    forward, backward, update = at(Kind.FORWARD), at(*_READ_BY_BACKWARD), at(*_APPLIED)
    # The update count never decreases from forward to forward: the minimum is the first one's.
    first = np.full(update.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, update, forward)
    return VersionCounters(forward, backward, update, first[update])


def _choose(
    kinds: np.ndarray, microbatches: np.ndarray, forward: Count, backward: Count, update: Count
) -> np.ndarray:
    """Select each row's value by its kind; ``forward`` and ``backward`` are by microbatch."""
    size = microbatches.max() + 1
    rows = [np.broadcast_to(each, size)[microbatches] for each in (forward, backward)]
    return np.where(kinds == Kind.UPDATE, update, np.where(kinds == Kind.FORWARD, *rows))


def _check_existence(version: np.ndarray, live: np.ndarray, stage: int, versions: Versions) -> None:
    wrong = (version > live) | (version < 0)
    if wrong.any():
        raise ValueError(
            f"versions must read a version from 0 to the newest, got {versions!r} that reads "
            f"version {version[wrong][0]} on stage {stage} after {live[wrong][0]} updates"
        )


def _most_copies_beside(version: np.ndarray, horizon: np.ndarray, live: np.ndarray) -> int:
    """Return the peak number of weights held besides the live ones, stashed once replaced.

    Before that update a prediction is recomputed for each reader, and held only while it is read.
    """
    pairs, which = np.unique(np.stack([version, horizon]), axis=1, return_inverse=True)
    which = which.reshape(-1)
    last = np.zeros(pairs.shape[1], dtype=np.int64)
    np.maximum.at(last, which, np.arange(len(live)))
    replaced = np.searchsorted(live, pairs[0], side="right")
    kept = replaced <= last
    change = np.zeros(len(live) + 1, dtype=np.int64)
    np.add.at(change, replaced[kept], 1)
    np.add.at(change, last[kept] + 1, -1)
    transient = (horizon != 0) & (version == live)
    return int((np.cumsum(change)[:-1] + transient).max())
