"""Compressed gradients and parameters in FSDP2: its custom reduce-scatter and all-gather."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ...comm import check_consistent_across_ranks
from ...comm.collectives import Collectives
from ...comm.comm_stats import CommStats
from ..compressor import AttachPoint, Compressor, validation_error_at
from ..state_store import StateStore
from .fsdp_collectives import gather, scatter_sum

_ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
_MARK = "_compressed_by_pyparallel"


class _CompressedCollective:
    """What the messages of one module's collective need; its group shows at the first call."""

    def __init__(self, compressor: Compressor, name: str) -> None:
        self.stats = CommStats()
        self._compressor = compressor
        self._name = name
        self._store: StateStore | None = None
        self._saved: dict[str, Any] = {}

    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """As FSDP2's own collectives do."""
        return torch.empty(*size, dtype=dtype, device=device)

    @property
    def residual_norm(self) -> float:
        """Of all that has not been sent yet; 0 before the first call."""
        return self._store.norm("residual") if self._store else 0.0

    def state_dict(self) -> dict[str, Any]:
        """As `StateStore.state_dict`; what was loaded, or nothing, before the first call."""
        return self._store.state_dict() if self._store else self._saved

    def check(self, state: dict[str, Any]) -> None:
        """Refuse what was saved with another compressor."""
        if state and state["compressor"] != repr(self._compressor):
            raise ValueError(
                f"state must be of compressor {self._compressor}, got {state['compressor']}"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `StateStore.load_state_dict`, which refuses at the next call."""
        self._saved, self._store = copy.deepcopy(state), None

    def _open(self, group: dist.ProcessGroup) -> tuple[StateStore, Collectives]:
        collectives = Collectives(group, self.stats)
        if self._store is None:
            self._store = StateStore(self._compressor, collectives.rank, collectives.size)
            if self._saved:
                self._store.load_state_dict(self._saved)
                self._saved = {}
        return self._store, collectives


class CompressedReduceScatter(_CompressedCollective, ReduceScatter):
    """FSDP2's reduce-scatter of one module's gradients: `fsdp_reduce_scatter` makes it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Done, or on a GPU queued, on return; whether ``async_op`` or not.

        Args:
            output_tensor: (numel,). Written.
            input_tensor: (ranks * numel,) float32, bfloat16 or float16.
            group: whose ranks take part.
            op: a sum, an average, or a sum times a factor.
            async_op: changes nothing.

        Raises:
            ValueError: another op or dtype.
            CorruptMessageError: on every rank, naming the rank whose message it was.
        """
        factor = _factor_of(op, group.size())
        store, collectives = self._open(group)
        with torch.no_grad():
            total = scatter_sum(input_tensor, self._name, store, collectives)
            output_tensor.copy_(total.mul_(factor))


class CompressedAllGather(_CompressedCollective, AllGather):
    """FSDP2's all-gather of one module's parameters: `fsdp_all_gather` makes it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Done, or on a GPU queued, on return; whether ``async_op`` or not.

        Args:
            output_tensor: (ranks * numel,). Written.
            input_tensor: (numel,) float32, bfloat16 or float16, perhaps a part of the output.
            group: whose ranks take part.
            async_op: changes nothing.

        Raises:
            ValueError: another dtype. FSDP2 gathers bytes, uint8, where a module's parameters are
                of several dtypes or bring an all-gather of their own.
            CorruptMessageError: on every rank, naming the rank whose message it was.
        """
        store, collectives = self._open(group)
        with torch.no_grad():
            gather(input_tensor, output_tensor, self._name, store, collectives)


def fsdp_reduce_scatter(compressor: Compressor, name: str = "module") -> CompressedReduceScatter:
    """What ``FSDPModule.set_custom_reduce_scatter`` takes, for one module's gradients.

    Each rank encodes its whole unsharded gradient once, hands each other rank the part that is its
    own, and adds up in float32 what comes. Residuals are of the unsharded gradient, 4 bytes an
    entry: as much memory as FSDP saves by sharding gradients. Where a process group has one rank,
    FSDP2 calls no collective. In HSDP, gradients are compressed among the ranks that share one
    copy; the all-reduce between copies, of the shards alone, stays PyTorch's own.

    Args:
        compressor: of all gradients, the same on all ranks.
        name: of the module, the same on all ranks; modules of other names draw apart.

    Returns:
        one for this module alone. A module keeps the last one that it was given, as PyTorch has it.

    Raises:
        ValueError: a compressor that does not serve here.
    """
    _check_supported(compressor, AttachPoint.FSDP_GRADIENTS)
    return CompressedReduceScatter(compressor, name)


def fsdp_all_gather(compressor: Compressor, name: str = "module") -> CompressedAllGather:
    """What ``FSDPModule.set_custom_all_gather`` takes, for one module's parameters.

    Every rank computes with what messages decode to, its own shard included, so all have the same
    bits; the optimizer goes on with the shards as they are (arXiv 2302.02497 and arXiv 2306.10209
    train so with 8 bits). A compressor that draws gives backward other parameters than forward,
    where these are gathered twice: ``fully_shard(..., reshard_after_forward=False)`` gathers once.

    Args:
        compressor: of all parameters, the same on all ranks.
        name: of the module, the same on all ranks; modules of other names draw apart.

    Returns:
        one for this module alone. A module keeps the last one that it was given, as PyTorch has it.

    Raises:
        ValueError: a compressor that does not serve here.
    """
    _check_supported(compressor, AttachPoint.FSDP_PARAMETERS)
    return CompressedAllGather(compressor, name)


class FSDPCompression:
    """What a model's compressed collectives remember between steps: `compress_fsdp` makes it."""

    def __init__(self, places: dict[str, dict[str, _CompressedCollective]]) -> None:
        self._places = places
        self._stats = CommStats()

    @property
    def last_step(self) -> CommStats:
        """What this rank has spent since the model was last called."""
        return self._stats

    @property
    def residual_norm(self) -> float:
        """Of all gradients that have not been sent yet; 0 without error feedback."""
        return math.hypot(*(each.residual_norm for each in self._each()))

    def state_dict(self) -> dict[str, Any]:
        """What this rank has to remember, by place and module: {place: {module: state}}.

        Other ranks remember other things, and another number of ranks cannot go on with it. Tensors
        may be the live ones.
        """
        return {
            place: {name: each.state_dict() for name, each in modules.items()}
            for place, modules in self._places.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, bit for bit; between steps.

        Raises:
            ValueError: it was taken of other modules or with another compressor; with another
                number of ranks or of other shapes, the next step raises it.
        """
        if not isinstance(state, dict) or set(state) != set(self._places):
            raise ValueError(
                f"state must be what state_dict() has returned, with {' and '.join(self._places)}, "
                f"got {sorted(state) if isinstance(state, dict) else state!r}"
            )
        for place, mine in self._places.items():
            if set(state[place]) != set(mine):
                raise ValueError(
                    f"state must be of the {place} of the modules {sorted(mine)}, "
                    f"got one of {sorted(state[place])}"
                )
            for name, each in mine.items():
                each.check(state[place][name])
        for place, mine in self._places.items():
            for name, each in mine.items():
                each.load_state_dict(state[place][name])

    def begin_step(self) -> None:
        """Count anew."""
        self._stats = CommStats()
        for each in self._each():
            each.stats = self._stats

    def _each(self) -> list[_CompressedCollective]:
        return [each for modules in self._places.values() for each in modules.values()]


def compress_fsdp(
    model: nn.Module,
    *,
    gradients: Compressor | None = None,
    parameters: Compressor | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> FSDPCompression:
    """Let all that ``fully_shard`` has been applied to in a model send compressed messages.

    ``compress_fsdp(model, gradients=ErrorFeedback(Int8()), parameters=Int8())``: as
    `fsdp_reduce_scatter` and `fsdp_all_gather`, with one memory for each module. While
    ``set_requires_gradient_sync(False)``, gradients add up uncompressed, and nothing is sent. All
    ranks of the group call it together, once.

    Args:
        model: in which ``fully_shard`` has been applied to some modules; often to itself, too.
        gradients: the compressor of reduce-scatters; None: these stay PyTorch's own.
        parameters: the compressor of all-gathers, without error feedback; None: likewise.
        process_group: of all ranks that have the model; None: the default one.

    Raises:
        DisagreementError: a compressor that does not serve FSDP2, or another one on another rank;
            a model without such modules, or one that is compressed already.
    """
    modules = {name: each for name, each in model.named_modules() if isinstance(each, FSDPModule)}
    served = (
        ("gradients", gradients, AttachPoint.FSDP_GRADIENTS),
        ("parameters", parameters, AttachPoint.FSDP_PARAMETERS),
    )
    problems = [validation_error_at(place, each) for _, each, place in served if each is not None]
    problem = next((each for each in [_validation_error(modules), *problems] if each), None)
    config_fields = [(key, repr(each)) for key, each, _ in served]
    check_consistent_across_ranks(
        [*config_fields, ("modules", ", ".join(modules))], problem, process_group
    )
    compression = FSDPCompression(
        {
            "gradients": {} if gradients is None else _scatters(gradients, modules),
            "parameters": {} if parameters is None else _gathers(parameters, modules),
        }
    )
    compression.begin_step()
    model.register_forward_pre_hook(lambda *_: compression.begin_step(), prepend=True)
    return compression


def _scatters(
    compressor: Compressor, modules: dict[str, FSDPModule]
) -> dict[str, _CompressedCollective]:
    made: dict[str, _CompressedCollective] = {}
    for name, module in modules.items():
        made[name] = comm = fsdp_reduce_scatter(compressor, name)
        module.set_custom_reduce_scatter(comm)
        vars(module)[_MARK] = True
    return made


def _gathers(
    compressor: Compressor, modules: dict[str, FSDPModule]
) -> dict[str, _CompressedCollective]:
    made: dict[str, _CompressedCollective] = {}
    for name, module in modules.items():
        made[name] = comm = fsdp_all_gather(compressor, name)
        module.set_custom_all_gather(comm)
        vars(module)[_MARK] = True
    return made


def _validation_error(modules: dict[str, FSDPModule]) -> str | None:
    if not modules:
        return "model must have modules that fully_shard was applied to, got none: apply it before"
    marked = [name for name, module in modules.items() if _MARK in vars(module)]
    if marked:
        return f"model must not be compressed yet, got one whose module {marked[0]!r} is"
    return None


def _check_supported(compressor: Compressor, place: AttachPoint) -> None:
    problem = validation_error_at(place, compressor)
    if problem is not None:
        raise ValueError(problem)


def _factor_of(op: _ReduceOp, num_ranks: int) -> float:
    """What a sum over ranks is to be multiplied by."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / num_ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        reduce_state: Any = op.__getstate__()  # nothing else tells the factor
        return float(reduce_state[1])
    raise ValueError(f"op must be SUM, AVG or PREMUL_SUM, got {op}")
