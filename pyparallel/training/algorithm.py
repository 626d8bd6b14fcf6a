"""The interface of an algorithm: an immutable configuration that starts a ModelAverager."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn
from torch.optim import Optimizer

from ..comm import Run
from .averager import ModelAverager
from .buckets import FlatBuckets

_OF_MEMBERS = (
    "algorithm must be SGP or DPSGD over a process group, or LocalSGD, DiLoCo or NoLoCo of whole "
    "models and without delay, with membership, as all others need all ranks to stay"
)
_OF_DTYPES = "parameters must not be float64 with a compressor"
_TAKE_GOSSIP = ": take a gossip algorithm such as SGP, or a schedule that flushes"


@dataclass(frozen=True)
class Place:
    """Where an algorithm runs.

    Args:
        num_ranks: that average with each other.
        size_rule: begins the error of another number; "": that of ranks in a process group.
        dtypes: of the trainable parameters.
        is_sharded: ``fully_shard`` has sharded the module; each shard is averaged by itself.
        has_members: the ranks come and go.
        is_inner: another algorithm runs it.
        schedule: of the pipelines whose replicas the ranks are, by its name; None: of none.
        flushes: this schedule does.
    """

    num_ranks: int
    size_rule: str = ""
    dtypes: frozenset[torch.dtype] = frozenset()
    is_sharded: bool = False
    has_members: bool = False
    is_inner: bool = False
    schedule: str | None = None
    flushes: bool = True


class Algorithm(ABC):
    """The immutable configuration of an algorithm; a subclass is a frozen dataclass.

    Attributes:
        averages_gradients: before each update, instead of weights.
        averages_over_all: what is averaged, is so over all ranks.
        takes_outer_steps: of the models, at an interval; between them each rank trains alone.
        needs_losses: of each step, by ``record_loss()``.
        can_be_inner: others can run it; False if it communicates in other ways too.
        refuses_shards: what it must do for the shards of a module, and why it does not; "": it can.
    """

    averages_gradients: ClassVar[bool] = False
    averages_over_all: ClassVar[bool] = False
    takes_outer_steps: ClassVar[bool] = False
    needs_losses: ClassVar[bool] = False
    can_be_inner: ClassVar[bool] = True
    refuses_shards: ClassVar[tuple[str, str]] = ("", "")

    @property
    def can_have_members(self) -> bool:
        """Whether ranks may come and go."""
        return False

    def bind(self, num_ranks: int) -> Self:
        """Return the algorithm for a number of ranks; a ValueError if it has no such topology."""
        return self

    @abstractmethod
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> ModelAverager:
        """Start the algorithm, which is bound, on this rank; parameters are equal on all ranks.

        ``optimizer`` is the trainer's, or for several an object with their ``param_groups`` and
        ``state``. Its hooks reference the trainer, so keep only a ``weakref.proxy``. ``buckets``
        are those of the trainable parameters.
        """

    def config_fields(self) -> list[tuple[str, str]]:
        """Return the (name, value) pairs that must be equal on all ranks."""
        return [("algorithm", repr(self))]

    def error_at(self, place: Place) -> str | None:
        """Return why the algorithm, which is bound, cannot run at a place, or None."""
        rule, why_not = self.refuses_shards
        of_shards = f"algorithm must {rule} a module that fully_shard has sharded"
        of_weights = f"replicas must average weights with {place.schedule}, whose updates no rank"
        of_losses = "replicas must average without losses, which one stage knows"
        is_compressed = getattr(self, "compressor", None) is not None
        in_time = not place.schedule or place.flushes or not self.averages_gradients
        rules = [  # whether it is broken, the rule, and the end of the sentence
            (place.is_inner and not self.can_be_inner, "inner must be a gossip algorithm", ""),
            (place.has_members and not self.can_have_members, _OF_MEMBERS, ""),
            (place.is_sharded and rule != "", of_shards, why_not),
            (not in_time, f"{of_weights} waits for", _TAKE_GOSSIP),
            (place.schedule and self.needs_losses, of_losses, ": take SGP or DiLoCo"),
            (is_compressed and torch.float64 in place.dtypes, _OF_DTYPES, ""),
        ]
        return next((f"{text}, got {self!r}{end}" for broken, text, end in rules if broken), None)
