"""How fast a topology averages: its mixing curve and its spectral gap."""

from dataclasses import dataclass

import numpy as np

from .base import Circulant, Topology

_DENSE = 400  # up to so many ranks, eigenvalues of the whole matrix are cheap
_MOST_ROUNDS = 20_000
_NOTHING = 1e-9  # what rounding the shares leaves of an exact average is less


@dataclass(frozen=True)
class _Edges:
    """A round as a sparse matrix: who sends which share to whom, and what each one keeps."""

    senders: np.ndarray
    receivers: np.ndarray
    shares: np.ndarray
    kept: np.ndarray

    @staticmethod
    def of(topology: Topology, round_index: int) -> "_Edges":
        """Read from a topology."""
        edges = [
            (rank, peer, share)
            for rank in range(topology.num_ranks)
            for peer, share in zip(
                topology.out_peers(rank, round_index),
                topology.shares(rank, round_index),
                strict=True,
            )
        ]
        senders, receivers, shares = np.array(edges or np.zeros((0, 3))).T
        kept = 1 - np.bincount(senders.astype(int), shares, minlength=topology.num_ranks)
        return _Edges(senders.astype(int), receivers.astype(int), shares, kept)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The mixing matrix times (n, c) values."""
        result: np.ndarray = self.kept[:, None] * values
        for column in range(values.shape[1]):
            sent = self.shares * values[self.senders, column]
            result[:, column] += np.bincount(self.receivers, sent, minlength=len(values))
        return result


def mixing_curve(topology: Topology, num_rounds: int, *, seed: int = 0) -> np.ndarray:
    """How far ranks that began with random numbers are from their average, after each round.

    Args:
        topology: who averages with whom.
        num_rounds: how far to look.
        seed: of the numbers.

    Returns:
        (num_rounds + 1,) float64: the norm of the de-biased numbers' distance from the average,
        divided by that before the first round; where it is exact it is at rounding level.
    """
    edges = [_Edges.of(topology, index) for index in range(min(topology.period, num_rounds))]
    values = np.random.default_rng(seed).standard_normal((topology.num_ranks, 4))
    values -= values.mean(axis=0)
    state = np.concatenate([values, np.ones((topology.num_ranks, 1))], axis=1)
    errors = [np.linalg.norm(values)]
    for index in range(num_rounds):
        state = edges[index % topology.period].apply(state)
        errors.append(np.linalg.norm(state[:, :-1] / state[:, -1:]))
    curve: np.ndarray = np.array(errors) / max(errors[0], np.finfo(float).tiny)
    return curve


def spectral_gap(topology: Topology) -> float:
    """1 - the factor by which one round shrinks disagreement in the long run; 1 if it ends exactly.

    The second largest modulus of an eigenvalue of one period's matrix, to the power 1 / period:
    in closed form for circulant graphs, from all eigenvalues for static ones up to 400 ranks, by
    power iteration elsewhere.
    """
    if topology.num_ranks == 1:
        return 1.0
    if isinstance(topology, Circulant):
        rate = float(_circulant_modulus(topology) ** (1 / topology.period))
    elif topology.num_ranks <= _DENSE and topology.period == 1:
        moduli = np.abs(np.linalg.eigvals(topology.mixing_matrix(0)))
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
    return modulus if modulus > _NOTHING else 0.0


def _iterated_rate(topology: Topology) -> float:
    """The mean factor per round once the slowest direction is all that is left."""
    edges = [_Edges.of(topology, index) for index in range(topology.period)]
    values = np.random.default_rng(0).standard_normal((topology.num_ranks, 1))
    values -= values.mean()
    values /= np.linalg.norm(values)
    before = 0.0
    for _ in range(max(2, _MOST_ROUNDS // topology.period)):
        logarithm = 0.0
        for each in edges:
            values = each.apply(values)
            values -= values.mean()  # rounding puts back what must stay zero
            norm = float(np.linalg.norm(values))
            if norm < _NOTHING:
                return 0.0
            logarithm += np.log(norm) / topology.period
            values /= norm
        if abs(logarithm - before) < 1e-7 * abs(logarithm):
            break
        before = logarithm
    return float(np.exp(logarithm))
