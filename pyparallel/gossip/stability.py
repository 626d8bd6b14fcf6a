"""The learning rates that are stable, by topology, order, delay and momentum."""

from typing import NamedTuple

import numpy as np

from ..training import wrong_type
from ..training.arguments import check_in, require
from .algorithms.osgp import OSGP
from .algorithms.sgp import SGP
from .topology import Circulant, Topology

_MAX_DENSE_RANKS = 32  # of topologies whose modes are not known in closed form
_GRID = 0.02  # of lr * L, on which the first unstable one is searched
_TOLERANCE = 1e-9  # of the spectral radius: rounding
_NUM_CYCLES = 10_000  # at most, until push-sum weights repeat


def stability_limit(
    algorithm: SGP | OSGP, *, momentum: float = 0.0, nesterov: bool = False
) -> float:
    """Return the learning rate below which SGD converges on ``f(z) = z^2 / 2`` on every rank.

    For a function of curvature L divide by it: the limit is that of ``lr * L``. One rank alone has
    2, or ``2 (1 + momentum)``. On several ranks their differences have limits of their own. With
    ``SGP(topology, overlap=1)`` and a static mixing matrix P the difference d along an eigenvector
    with eigenvalue lambda follows ``d <- (lambda - lr * L) d``. So the limit is 1 plus the least
    eigenvalue, which ``Lazy(topology, gamma)`` raises.

    Computed as the end of the interval from 0 in which the spectral radius of one period of steps
    is below 1, on a grid of 0.02 and then by bisection. Rounds before a topology's period are left
    out. No process group is needed.

    Args:
        algorithm: ``SGP``, ``DPSGD`` or ``OSGP``, without a compressor.
        momentum: of ``torch.optim.SGD``, in [0, 1), without dampening.

    Returns:
        The limit, to about 1e-6.

    Raises:
        TypeError: ``algorithm`` is another one.
        ValueError: it has a compressor or is biased; ``momentum`` is not in [0, 1), or 0 with
            ``nesterov``; or the topology is not circulant and has more than 32 ranks.
    """
    if not isinstance(algorithm, SGP | OSGP):
        raise wrong_type("algorithm", "an SGP, DPSGD or OSGP", algorithm)
    if algorithm.compressor is not None:
        raise ValueError(f"algorithm must have no compressor, got {algorithm!r}")
    if algorithm.biased:
        raise ValueError(f"algorithm must not be biased, got {algorithm!r}")
    check_in("momentum", momentum, "[0, 1)")
    rule = "momentum must be above 0 for nesterov, as in torch.optim.SGD"
    require(momentum or not nesterov, rule, 0)
    steps = _Steps(algorithm, momentum, nesterov)
    low, high = 0.0, _GRID
    while not steps.is_unstable(high):
        low, high = high, high + _GRID
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if steps.is_unstable(middle) else (middle, high)
    return low


class _Round(NamedTuple):
    """A mixing matrix as blocks, (b, m, m): what ranks keep, and what they send."""

    kept: np.ndarray
    sent: np.ndarray


class _Steps:
    """The steps of one period as linear maps of x, the momentum buffer, and messages in flight.

    A circulant matrix is n blocks of 1 x 1, one for each mode of the discrete Fourier transform;
    another one is one block. The first block holds the mode in which all ranks are equal, so it
    also moves the push-sum weights.
    """

    def __init__(self, algorithm: SGP | OSGP, momentum: float, nesterov: bool) -> None:
        self._momentum, self._nesterov = momentum, nesterov
        self._sends_first = algorithm.merges_after_update
        self._delay = algorithm.overlap
        self._merges_first = self._delay > 0 and not self._sends_first
        self._rounds = _rounds_of(algorithm.bound_topology)
        self._weights = self._periodic_weights()

    def is_unstable(self, lr: float) -> bool:
        """Return whether the spectral radius of one period exceeds 1."""
        blocks, size, _ = self._rounds[0].kept.shape
        start = np.eye(3 * size, dtype=self._rounds[0].sent.dtype).reshape(3, 1, size, 3 * size)
        x, buffer, flight = np.broadcast_to(start, (3, blocks, size, 3 * size))
        for matrices, weights in zip(self._rounds, self._weights, strict=True):
            for step, weight in enumerate(weights):
                gradient = x / weight[:, None]
                if step == 0 and self._merges_first:
                    x = x + flight
                buffer = self._momentum * buffer + gradient
                x = x - lr * (gradient + self._momentum * buffer if self._nesterov else buffer)
                if step == 0:
                    x, flight = self._exchange(matrices, x, flight)
        state = np.concatenate([x, buffer, flight], 1)
        return bool(np.abs(np.linalg.eigvals(state)).max() > 1 + _TOLERANCE)

    def _exchange(
        self, matrices: _Round, x: np.ndarray, flight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Send a round; return what the ranks then hold, and what is in flight."""
        kept, sent = matrices.kept @ x, matrices.sent @ x
        if self._sends_first:
            return kept + flight, sent
        return (kept, sent) if self._delay else (kept + sent, flight)

    def _periodic_weights(self) -> list[list[np.ndarray]]:
        """Return the push-sum weights (m,) at the gradients of each step of a period."""
        size = self._rounds[0].kept.shape[1]
        w, flight = np.ones(size), np.zeros(size)
        cycle: list[list[np.ndarray]] = []
        for _ in range(_NUM_CYCLES):
            begin, cycle = w, []
            for matrices in self._rounds:
                first = _Round(matrices.kept[0].real, matrices.sent[0].real)
                at_gradients = [w]
                if self._merges_first:
                    w = w + flight
                w, flight = self._exchange(first, w, flight)
                cycle.append(at_gradients + [w] * (max(1, self._delay) - 1))
            if np.allclose(begin, w, rtol=0, atol=1e-13):
                break
        return cycle


def _rounds_of(topology: Topology) -> list[_Round]:
    """Return the rounds of one period; a ValueError if their matrices would be too large."""
    repeated = topology.rounds[topology.preperiod :]
    if isinstance(topology, Circulant):
        return [_modes(topology, index) for index in repeated]
    if topology.num_ranks > _MAX_DENSE_RANKS:
        raise ValueError(
            f"topology must have at most {_MAX_DENSE_RANKS} ranks, unless it is circulant such as "
            f"OnePeerExponential, got {topology!r}"
        )
    matrices = [topology.mixing_matrix(index) for index in repeated]
    kept = [np.diag(np.diag(matrix)) for matrix in matrices]
    return [
        _Round(own[None], (matrix - own)[None]) for matrix, own in zip(matrices, kept, strict=True)
    ]


def _modes(topology: Circulant, round_index: int) -> _Round:
    """Return the eigenvalues of a circulant round, by the discrete Fourier transform."""
    shares = topology.shares(0, round_index)
    column = np.zeros(topology.num_ranks)
    column[[offset % topology.num_ranks for offset in topology.offsets(round_index)]] = shares
    sent = np.fft.fft(column)[:, None, None]
    return _Round(np.full_like(sent, 1 - sum(shares)), sent)
