"""What a rank measures while it trains: its actions, its waits, staleness, norms of gradients."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..messages.endpoints import StreamKind
from ..messages.stage_p2p import StageP2P
from ..schedules.action import Action, Kind
from .clipping import squared_norm
from .stage import Stage
from .weight_copies import VersionKey

_ENDS_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.LEARN)


@dataclass(frozen=True)
class Span:
    """An action that has run, in seconds of a clock that all ranks of a machine share.

    Args:
        begin: after the wait for the action's inputs. On a GPU, times are the host's.
        end: of the action, before its output is sent.
        waited: for messages, between the action before and this one.
        weights: the version that a forward or backward has read, and how many updates it was
            predicted ahead; of an update the version before it. Counted since the last flush. None:
            it has read none, as in ``evaluate``.
    """

    action: Action
    begin: float
    end: float
    waited: float = 0.0
    weights: VersionKey | None = None


class Telemetry:
    """Records the actions of a rank; ``spans`` are those of the last run."""

    def __init__(self, stages: Mapping[int, Stage], p2p: StageP2P) -> None:
        self.spans: list[Span] = []
        self._stages, self._p2p = stages, p2p
        self._is_training = False
        self._waited = 0.0  # of the run, up to the last action
        self._in_flight: dict[int, dict[int, VersionKey]] = {index: {} for index in stages}
        self._unapplied: dict[int, list[VersionKey]] = {index: [] for index in stages}
        self._most_in_flight = Counter[int]()  # of the last run, by stage
        # Of the gradients that the last run has applied: updates late, and updates predicted.
        self._applied: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._norms: dict[int, Tensor] = {}  # 0-d, of the last updates

    def begin(self, *, is_training: bool) -> None:
        """Begin a run of actions."""
        self.spans, self._is_training = [], is_training
        self._waited = 0.0
        self._p2p.waited.clear()
        self._applied.clear()
        self._most_in_flight.clear()

    def record(self, action: Action, begin: float) -> None:
        """Record an action that ends now."""
        end = time.perf_counter()
        waited = sum(self._p2p.waited.values())
        weights = self._stages[action.stage].weights.take_last_read()
        self.spans.append(Span(action, begin, end, waited - self._waited, weights))
        self._waited = waited
        if not self._is_training:
            return
        stage, kind, microbatch = action
        in_flight = self._in_flight[stage]
        if kind is Kind.FORWARD and weights is not None:
            in_flight[microbatch] = weights
            self._most_in_flight[stage] = max(self._most_in_flight[stage], len(in_flight))
        elif kind in _ENDS_GRADIENT and microbatch in in_flight:
            self._unapplied[stage].append(in_flight.pop(microbatch))
        elif kind is Kind.UPDATE and weights is not None:
            for read in self._unapplied[stage]:
                self._applied[stage].append((weights.version - read.version, read.horizon))
            self._unapplied[stage].clear()

    def measure_gradient(self, stage: Stage) -> None:
        """Keep the norm of a stage's gradient, if it is measured; the host does not wait."""
        if stage.options.measures_gradients and not stage.skips_update and stage.gradients:
            gradients = stage.gradients
            self._norms[stage.index] = squared_norm(gradients, gradients[0].device).sqrt()

    def metrics(self) -> dict[str, float]:
        """Return what is described in ``PipelineTrainer.metrics``, but the loss."""
        waited = self._p2p.waited
        busy: defaultdict[int, float] = defaultdict(float)
        for span in self.spans:
            busy[span.action.stage] += span.end - span.begin
        found = {
            "rank/busy_seconds": sum(busy.values(), 0.0),
            "rank/waiting_seconds": sum(waited.values(), 0.0),
            "rank/waiting_for_activations_seconds": waited[StreamKind.ACTIVATIONS],
            "rank/waiting_for_gradients_seconds": waited[StreamKind.GRADIENTS],
            "rank/waiting_for_ranks_seconds": waited[None],
            "rank/bytes_sent": float(self._p2p.bytes_sent),
            "rank/bytes_received": float(self._p2p.bytes_received),
        }
        for index, stage in self._stages.items():
            own = self._metrics_of(index, stage)
            own["busy_seconds"] = busy[index]
            found |= {f"stage{index}/{name}": float(value) for name, value in own.items()}
        devices = {p.device for stage in self._stages.values() for p in stage.module.parameters()}
        for device in devices - {torch.device("cpu")}:
            found["rank/peak_memory_bytes"] = float(torch.accelerator.max_memory_allocated(device))
        return found

    def _metrics_of(self, index: int, stage: Stage) -> dict[str, float]:
        copies = stage.weights.peak_copies
        found: dict[str, float] = {
            "updates": stage.num_updates,
            "skipped_updates": stage.num_skipped,
            "peak_weight_copies": copies,
            "peak_weight_bytes": copies * sum(p.nbytes for p in stage.optimized),
            "peak_microbatches": self._most_in_flight[index],
        }
        if applied := self._applied[index]:
            late, predicted = (sum(each) / len(applied) for each in zip(*applied, strict=True))
            found |= {"staleness": late, "prediction_horizon": predicted}
        if index in self._norms:
            found["gradient_norm"] = self._norms[index].item()
        return found
