"""Mixing rate of a topology: its consensus error over rounds and its spectral gap."""

import numpy as np

from .base import Circulant, Topology

_MAX_DENSE_RANKS = 400  # up to this size, eigenvalues of the dense matrix are cheap
_MAX_ROUNDS = 20_000
_ROUNDING_ERROR = 1e-9  # rounded shares leave less than this of an exact average


def mixing_curve(topology: Topology, num_rounds: int, *, seed: int = 0) -> np.ndarray:
    """Compute the consensus error of random initial values after each round.

    Args:
        seed: any integer of at least 0, for numpy.

    Returns:
        (num_rounds + 1,) float64: the norm of the de-biased values' distance from their average,
        relative to the initial one; an exact average shows as rounding error.
    """
    edges = [topology.round_edges(index) for index in topology.rounds[:num_rounds]]
    values = np.random.default_rng(seed).standard_normal((topology.num_ranks, 4))
    values -= values.mean(axis=0)
    state = np.concatenate([values, np.ones((topology.num_ranks, 1))], axis=1)
    errors = [np.linalg.norm(values)]
    for index in range(num_rounds):
        state = edges[topology.equivalent_round(index)].apply(state)
        errors.append(np.linalg.norm(state[:, :-1] / state[:, -1:]))
    curve: np.ndarray = np.array(errors) / max(errors[0], np.finfo(float).tiny)
    return curve


def spectral_gap(topology: Topology) -> float:
    """Return 1 - the mixing rate: the asymptotic reduction of the consensus error per round.

    Only rounds that repeat count: of open-ended phases the last one.

    The mixing rate is the second largest eigenvalue modulus of one period's mixing matrix, to the
    power 1 / period: in closed form for circulant graphs, from all eigenvalues for static graphs of
    up to 400 ranks, by power iteration otherwise. The gap is 1 if consensus is exact after finitely
    many rounds.
    """
    if topology.num_ranks == 1:
        return 1.0
    if isinstance(topology, Circulant):
        rate = float(_circulant_modulus(topology) ** (1 / topology.period))
    elif topology.num_ranks <= _MAX_DENSE_RANKS and topology.period == 1:
        moduli = np.abs(np.linalg.eigvals(topology.mixing_matrix(topology.preperiod)))
        rate = float(np.sort(moduli)[-2])
    else:
        rate = _iterated_rate(topology)
    return 1 - rate


def _circulant_modulus(topology: Circulant) -> float:
    product = np.ones(topology.num_ranks, dtype=complex)
    for index in range(topology.period):
        column = np.zeros(topology.num_ranks)
        shares = topology.shares(0, index)
        column[[offset % topology.num_ranks for offset in topology.offsets(index)]] = shares
        column[0] = 1 - sum(shares)
        product *= np.fft.fft(column)
    modulus = float(np.abs(product[1:]).max())
    return modulus if modulus > _ROUNDING_ERROR else 0.0


def _iterated_rate(topology: Topology) -> float:
    """Return the mixing rate per round, by power iteration."""
    edges = [topology.round_edges(index) for index in topology.rounds[topology.preperiod :]]
    values = np.random.default_rng(0).standard_normal((topology.num_ranks, 1))
    values -= values.mean()
    values /= np.linalg.norm(values)
    before = 0.0
    for _ in range(max(2, _MAX_ROUNDS // topology.period)):
        logarithm = 0.0
        for edge in edges:
            values = edge.apply(values)
            values -= values.mean()  # rounding errors have a mean, which would never shrink
            norm = float(np.linalg.norm(values))
            if norm < _ROUNDING_ERROR:
                return 0.0
            logarithm += np.log(norm) / topology.period
            values /= norm
        if abs(logarithm - before) < 1e-7 * abs(logarithm):
            break
        before = logarithm
    return float(np.exp(logarithm))
