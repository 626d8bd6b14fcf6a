"""Custom collectives of FSDP2: compressed ones, and its own with errors that name ranks."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    foreach_reduce,
)

from ...comm import ANY, Run, StepCounts
from ...comm.collectives import Collectives
from ...comm.errors import NonFiniteError
from ...comm.profiling import profiled
from ...comm.stats import CommStats
from ...training import plain_name
from ...training.arguments import require
from ...training.nonfinite import NonFinitePolicy
from ..compressor import Compressor
from ..layout import BufferLayout, Piece
from ..nonfinite import NonFiniteCheck
from ..state_store import StateStore, steps_of
from .end_of_backward import raise_at_end_of_backward
from .fsdp_collectives import compressed_all_gather, compressed_reduce_scatter

_FOREACH_REDUCE = inspect.unwrap(foreach_reduce).__code__
_ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


class _Step:
    """What the collectives of a model share in a step: bytes and seconds, and its number."""

    def __init__(self) -> None:
        self.stats = CommStats()
        self.counts = StepCounts(ANY)  # none, until `begin`

    def begin(self, number: int) -> None:
        self.stats = CommStats()
        self.counts.reset(number)


class _CompressedCollective:
    """A compressed collective of one module; its group is known at the first call."""

    def __init__(self, compressor: Compressor, name: str, step: _Step | None = None) -> None:
        self._step = step or _Step()
        self._compressor = compressor
        self._name = name
        self._store: StateStore | None = None
        self._saved: dict[str, Any] = {}

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate a tensor as FSDP2's own collectives do."""
        return torch.empty(*size, dtype=dtype, device=device)

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all residuals; 0 before the first call."""
        return self._store.norm("residual") if self._store else 0.0

    def state_dict(self) -> dict[str, Any]:
        return self._store.state_dict() if self._store else self._saved

    def check(self, state: dict[str, Any]) -> list[tuple[str, str]]:
        """Return what of a state must be equal on all ranks; raise if it cannot be loaded."""
        if not state:  # saved before the first step
            return [("number of messages of state", "none")]
        saved = state.get("compressor")
        require(saved, "state must be a result of state_dict()", state)
        rule = f"state must have been saved with compressor {self._compressor}"
        require(saved == repr(self._compressor), rule, saved)
        # The group, and so the rank, is known at the next call, which checks them.
        StateStore(self._compressor, state.get("rank", 0), state["num_ranks"]).check_state(state)
        return [("number of messages of state", steps_of(state))]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; `StateStore.load_state_dict` checks it at the next call."""
        self._saved, self._store = copy.deepcopy(state), None

    def _open(self, group: dist.ProcessGroup) -> tuple[StateStore, Collectives]:
        collectives = Collectives(Run(group, counts=self._step.counts), self._step.stats)
        if self._store is None:
            self._store = StateStore(self._compressor, collectives.rank, collectives.size)
            if self._saved:
                self._store.load_state_dict(self._saved)
                self._saved = {}
        return self._store, collectives


class CompressedReduceScatter(_CompressedCollective, ReduceScatter):
    """FSDP2's reduce-scatter of one module's gradients; see `fsdp_reduce_scatter`."""

    def __init__(
        self,
        compressor: Compressor,
        name: str,
        nonfinite: NonFinitePolicy = "raise",
        root: str = "",
        step: _Step | None = None,
    ) -> None:
        super().__init__(compressor, name, step)
        self._nonfinite = NonFiniteCheck(nonfinite)
        self._root = root
        self._num_calls = 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter; finished, or on a GPU queued, on return, with or without ``async_op``.

        An op other than SUM, AVG or PREMUL_SUM, or a dtype other than float32, bfloat16 or float16,
        is a ValueError. A CorruptMessageError names the sender on every rank, a NonFiniteError a
        rank and a parameter; by "skip", and on a GPU, such an input is set to 0.
        """
        factor = _factor_of(op, group.size())
        store, collectives = self._open(group)
        self._num_calls += 1
        with torch.no_grad(), profiled("pyparallel::reduce_scatter"):
            pieces = self._pieces()
            layout = BufferLayout(pieces * group.size())
            if not pieces:
                name = f"a parameter of {self._name or 'the model'}"
                layout = BufferLayout.flat(input_tensor.numel(), name)
            try:
                self._nonfinite.apply_(input_tensor, layout, collectives, self._num_calls)
            except NonFiniteError as error:
                output_tensor.zero_()
                raise_at_end_of_backward(error)
                return
            total = compressed_reduce_scatter(input_tensor, self._name, store, collectives, pieces)
            output_tensor.copy_(total.mul_(factor))

    def _pieces(self) -> tuple[Piece, ...]:
        """Return a shard's padded part of each parameter; none if another than FSDP2 has called.

        FSDP2 reduces those that have a gradient, which change from step to step, and passes the
        buffer alone: only its own call frame has them.
        """
        frame = inspect.currentframe()
        while frame and frame.f_code is not _FOREACH_REDUCE:
            frame = frame.f_back
        if frame is None:
            return ()
        return tuple(
            Piece(
                plain_name(f"{self._root}.{each._param_fqn}").removeprefix("."),
                (each.padded_sharded_param_size.numel(),),
            )
            for each in frame.f_locals["fsdp_params"]
        )


class CompressedAllGather(_CompressedCollective, AllGather):
    """FSDP2's all-gather of one module's parameters; see `fsdp_all_gather`."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """All-gather; errors are as of the reduce-scatter.

        FSDP2 gathers bytes, uint8, if parameters have several dtypes or their own all-gather.
        """
        store, collectives = self._open(group)
        with torch.no_grad(), profiled("pyparallel::all_gather"):
            compressed_all_gather(input_tensor, output_tensor, self._name, store, collectives)


class _Plain:
    """FSDP2's own collective on gloo, with errors that name the failed rank and the step."""

    _what: str

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self._step = step

    def __call__(self, **arguments: Any) -> Any:
        """Call it, with FSDP2's arguments; finished on return."""
        own: Any = super()
        run = Run(arguments["group"], counts=self._step.counts)
        with run.raising(f"the {self._what} failed"):
            return own.__call__(**{**arguments, "async_op": False})


class _PlainReduceScatter(_Plain, DefaultReduceScatter):  # type: ignore[misc]
    _what = "reduce-scatter"


class _PlainAllGather(_Plain, DefaultAllGather):  # type: ignore[misc]
    _what = "all-gather"


def _factor_of(op: _ReduceOp, num_ranks: int) -> float:
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / num_ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        reduce_state: Any = op.__getstate__()  # the only access to the factor
        return float(reduce_state[1])
    raise ValueError(f"op must be SUM, AVG or PREMUL_SUM, got {op}")
