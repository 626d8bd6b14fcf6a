"""Compressed gradients and parameters in FSDP2: a custom reduce-scatter and all-gather."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from ...comm import check_consistent_across_ranks, check_on_all_ranks, plain_name, summarize
from ...comm.arguments import NonFinitePolicy, find_policy_error
from ...comm.collectives import Collectives, CommStats
from ...comm.errors import NonFiniteError
from ...comm.failures import raising_peer_errors
from ..compressor import AttachPoint, Compressor, validation_error_at
from ..layout import BufferLayout, Piece
from ..nonfinite import NonFiniteCheck
from ..state_store import StateStore, steps_of
from ..wrappers.finite import Finite
from .end_of_backward import raise_at_end_of_backward
from .fsdp_collectives import compressed_all_gather, compressed_reduce_scatter

_ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
_MARK = "_compressed_by_pyparallel"


class _CompressedCollective:
    """A compressed collective of one module; its group is known at the first call."""

    def __init__(self, compressor: Compressor, name: str) -> None:
        self.stats = CommStats()
        self.step: int | None = None  # that errors name
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
        """Allocate a tensor as FSDP2's own collectives do."""
        return torch.empty(*size, dtype=dtype, device=device)

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all residuals; 0 before the first call."""
        return self._store.norm("residual") if self._store else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state; before the first call the loaded one, or an empty dict."""
        return self._store.state_dict() if self._store else self._saved

    def check(self, state: dict[str, Any]) -> list[tuple[str, str]]:
        """Return what of a state must be equal on all ranks.

        Raises:
            ValueError: it is of another compressor or of a newer pyparallel, damaged or malformed.
        """
        if state and not state.get("compressor"):
            raise ValueError(f"state must be a result of state_dict(), got {summarize(state)}")
        if state and state["compressor"] != repr(self._compressor):
            raise ValueError(
                f"state must have been saved with compressor {self._compressor}, got "
                f"{state['compressor']}"
            )
        if not state:  # saved before the first step
            return [("number of messages of state", "none")]
        # The group, and so the rank, is known at the next call, which checks them.
        StateStore(self._compressor, state.get("rank", 0), state["num_ranks"]).check_state(state)
        return [("number of messages of state", steps_of(state))]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; `StateStore.load_state_dict` checks it at the next call."""
        self._saved, self._store = copy.deepcopy(state), None

    def _open(self, group: dist.ProcessGroup) -> tuple[StateStore, Collectives]:
        collectives = Collectives(group, self.stats)
        collectives.step = self.step
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
        parameters: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        super().__init__(compressor, name)
        checks_itself = nonfinite == "raise" and isinstance(compressor, Finite)
        self._nonfinite = NonFiniteCheck("allow" if checks_itself else nonfinite)
        self._parameters = parameters
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

        Args:
            output_tensor: (numel,). Written.
            input_tensor: (ranks * numel,) float32, bfloat16 or float16. Set to 0 by
                ``nonfinite="skip"``, and on a GPU by "raise", if it is not finite.
            group: the process group.
            op: SUM, AVG or PREMUL_SUM.
            async_op: ignored.

        Raises:
            ValueError: another op or dtype.
            CorruptMessageError: on every rank, naming the rank that sent the corrupt message.
            NonFiniteError: on every rank, naming a rank and a parameter, or the module.
        """
        factor = _factor_of(op, group.size())
        store, collectives = self._open(group)
        self._num_calls += 1
        with torch.no_grad():
            layout = self._layout(input_tensor.numel(), group.size())
            try:
                self._nonfinite.apply_(input_tensor, layout, collectives, self._num_calls)
            except NonFiniteError as error:
                output_tensor.zero_()
                raise_at_end_of_backward(error)
                return
            total = compressed_reduce_scatter(input_tensor, self._name, store, collectives)
            output_tensor.copy_(total.mul_(factor))

    def _layout(self, numel: int, num_ranks: int) -> BufferLayout:
        """Return the layout of an input: for each rank, its rows of each parameter, padded."""
        shards = []
        for name, parameter in self._parameters:
            if parameter.requires_grad:
                rows, width = parameter.shape[0], math.prod(parameter.shape[1:])
                shards.append(Piece(name, (-(-rows // num_ranks) * width,)))
        layout = BufferLayout(tuple(shards) * num_ranks)
        if layout.numel == numel:
            return layout
        return BufferLayout.flat(numel, f"a parameter of {self._name or 'the model'}")


class CompressedAllGather(_CompressedCollective, AllGather):
    """FSDP2's all-gather of one module's parameters; see `fsdp_all_gather`."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """All-gather; finished, or on a GPU queued, on return, with or without ``async_op``.

        Args:
            output_tensor: (ranks * numel,). Written.
            input_tensor: (numel,) float32, bfloat16 or float16, possibly a view of the output.
            group: the process group.
            async_op: ignored.

        Raises:
            ValueError: another dtype. FSDP2 gathers bytes, uint8, if a module's parameters have
                several dtypes or their own all-gather.
            CorruptMessageError: on every rank, naming the rank that sent the corrupt message.
        """
        store, collectives = self._open(group)
        with torch.no_grad():
            compressed_all_gather(input_tensor, output_tensor, self._name, store, collectives)


class _PlainReduceScatter(DefaultReduceScatter):
    """FSDP2's own reduce-scatter on gloo, with errors that name the failed rank and the step."""

    step: int | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> Any:
        """Reduce-scatter; finished on return."""
        with raising_peer_errors(group, self.step, "the reduce-scatter failed"):
            return super().__call__(output_tensor, input_tensor, group, op)


class _PlainAllGather(DefaultAllGather):
    """FSDP2's own all-gather on gloo, with errors that name the failed rank and the step."""

    step: int | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """All-gather; finished on return."""
        with raising_peer_errors(group, self.step, "the all-gather failed"):
            return super().__call__(output_tensor, input_tensor, group)


def fsdp_reduce_scatter(
    compressor: Compressor, name: str = "module", *, nonfinite: NonFinitePolicy = "raise"
) -> CompressedReduceScatter:
    """Return a compressed collective for ``FSDPModule.set_custom_reduce_scatter``.

    Each rank encodes its whole unsharded gradient once, sends each rank its shard, and sums the
    received shards in float32. Residuals are of the unsharded gradient, 4 bytes an entry: as much
    memory as FSDP saves by sharding gradients. In a process group of one rank FSDP2 calls no
    collective. In HSDP, gradients are compressed within each replica; the all-reduce between
    replicas, of shards, stays PyTorch's own.

    Args:
        compressor: the compressor of all gradients, the same on all ranks.
        name: name of the module, the same on all ranks; it seeds random draws.
        nonfinite: as for `compress_fsdp`.

    Returns:
        a collective for this module alone. A module keeps the last one it was given, as in PyTorch.

    Raises:
        ValueError: the compressor does not support reduce-scatter, or there is no such policy.
    """
    _check_supported(compressor, AttachPoint.FSDP_GRADIENTS)
    if problem := find_policy_error(nonfinite):
        raise ValueError(problem)
    return CompressedReduceScatter(compressor, name, nonfinite)


def fsdp_all_gather(compressor: Compressor, name: str = "module") -> CompressedAllGather:
    """Return a compressed collective for ``FSDPModule.set_custom_all_gather``.

    Every rank computes with decoded parameters, its own shard included, so all ranks have the same
    bits; the optimizer updates the uncompressed shards (arXiv 2302.02497 and arXiv 2306.10209 train
    this way with 8 bits). A stochastic compressor gives backward other parameters than forward,
    since they are gathered twice: ``fully_shard(..., reshard_after_forward=False)`` gathers once.

    Args:
        compressor: the compressor of all parameters, the same on all ranks.
        name: name of the module, the same on all ranks; it seeds random draws.

    Returns:
        a collective for this module alone. A module keeps the last one it was given, as in PyTorch.

    Raises:
        ValueError: the compressor does not support all-gather.
    """
    _check_supported(compressor, AttachPoint.FSDP_PARAMETERS)
    return CompressedAllGather(compressor, name)


class FSDPCompression:
    """State of a model's compressed collectives; `compress_fsdp` creates it."""

    def __init__(
        self,
        places: dict[str, dict[str, _CompressedCollective]],
        uncompressed: Sequence[_PlainReduceScatter | _PlainAllGather],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._places = places
        self._uncompressed = uncompressed
        self._group = process_group
        self._stats = CommStats()
        self._sent_before = 0.0  # bytes, in the steps before
        self._num_steps = 0
        for each in self._each():
            each.stats = self._stats

    @property
    def last_step(self) -> CommStats:
        """Bytes and seconds of this rank since the last forward pass began."""
        return self._stats

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all gradient residuals; 0 without error feedback."""
        return math.hypot(*(each.residual_norm for each in self._each()))

    def metrics(self) -> dict[str, float]:
        """Return what this rank has measured, under names for TensorBoard, W&B or ``log_dict``.

        Nothing is exchanged, and uncompressed collectives are left out. On a GPU the host waits for
        the residual's norm.

        * ``rank/bytes_sent`` so far, assuming ring or pairwise collectives;
        * ``rank/waiting_seconds`` of the host in collectives since the last forward pass began. On
          NCCL streams wait instead;
        * ``rank/encode_seconds`` and ``rank/decode_seconds``, likewise, as in ``last_step``;
        * ``rank/residual_norm``: the Euclidean norm of what error feedback has not sent yet;
        * ``rank/steps``: forward passes.
        """
        return {
            "rank/bytes_sent": self._sent_before + self._stats.wire_bytes,
            "rank/waiting_seconds": self._stats.waiting_seconds,
            "rank/encode_seconds": self._stats.encode_seconds,
            "rank/decode_seconds": self._stats.decode_seconds,
            "rank/residual_norm": self.residual_norm,
            "rank/steps": float(self._num_steps),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: {"gradients" or "parameters": {module: state}}.

        It differs between ranks and cannot be loaded with another number of ranks. Tensors may
        share storage with the live state.
        """
        return {
            place: {name: each.state_dict() for name, each in modules.items()}
            for place, modules in self._places.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a ``state_dict`` between steps, to resume bit for bit; all ranks call it together.

        Raises:
            DisagreementError: (a ValueError) on all ranks, which have changed nothing: that of a
                rank was saved with other modules or another compressor, is damaged or malformed,
                or ranks have states of different steps. For another rank or number of ranks, or
                other shapes, the next step raises an error.
        """
        check_on_all_ranks(
            lambda: self._check_state(state),
            lambda fields, text: check_consistent_across_ranks(fields, text, self._group),
        )
        for place, mine in self._places.items():
            for name, each in mine.items():
                each.load_state_dict(state[place][name])

    def _check_state(self, state: Any) -> list[tuple[str, str]]:
        if not isinstance(state, dict) or set(state) != set(self._places):
            raise ValueError(
                f"state must be a result of state_dict(), with {' and '.join(self._places)}, "
                f"got {summarize(state)}"
            )
        fields = []
        # Older versions have saved the names that a compiled module gives.
        state = {place: {plain_name(n): s for n, s in of.items()} for place, of in state.items()}
        for place, mine in self._places.items():
            if set(state[place]) != set(mine):
                raise ValueError(
                    f"state must be of the {place} of the modules {sorted(mine)}, "
                    f"got one of {sorted(state[place])}"
                )
            for name, each in mine.items():
                fields += each.check(state[place][name])
        return fields

    def begin_step(self) -> None:
        """Count a step, which begins with a forward pass, and reset the statistics."""
        self._sent_before += self._stats.wire_bytes
        self._stats = CommStats()
        for each in self._each():
            each.stats, each.step = self._stats, self._num_steps
        for plain in self._uncompressed:
            plain.step = self._num_steps
        self._num_steps += 1

    def _each(self) -> list[_CompressedCollective]:
        return [each for modules in self._places.values() for each in modules.values()]


def compress_fsdp(
    model: nn.Module,
    *,
    gradients: Compressor | None = None,
    parameters: Compressor | None = None,
    process_group: dist.ProcessGroup | None = None,
    nonfinite: NonFinitePolicy = "raise",
) -> FSDPCompression:
    """Compress the collectives of all modules that ``fully_shard`` has been applied to.

    ``compress_fsdp(model, gradients=ErrorFeedback(Int8()), parameters=Int8())`` sets
    `fsdp_reduce_scatter` and `fsdp_all_gather` on each module. While
    ``set_requires_gradient_sync(False)``, gradients accumulate uncompressed and nothing is sent.
    All ranks of the group must call it, once.

    Gradients with a nan or an inf, in the unsharded gradients of one module on one rank, by
    ``nonfinite``: "raise" ends backward in the same `NonFiniteError` on all ranks, which names the
    first such rank and parameter. Nothing of that module is sent and its state is unchanged; those
    of modules that came earlier in that backward pass have been sent. Costs a pass over the
    unsharded gradients, and an all-gather of a number for each module. On a GPU the host does not
    wait: such a module's gradients count as zeros, and all ranks raise in the next backward pass.
    "skip": they count as zeros in the sum. "allow": nothing is read, as a ``GradScaler`` needs it.

    Args:
        model: ``fully_shard`` has been applied to some of its modules, often to itself too.
        gradients: the compressor of reduce-scatters; None: uncompressed.
        parameters: the compressor of all-gathers, without error feedback; None: uncompressed.
        process_group: all ranks that have the model; None: the default group.
        nonfinite: "raise", "skip" or "allow"; see above.

    Raises:
        DisagreementError: a compressor does not support FSDP2; an argument is invalid or differs
            between ranks; the model has no such modules or is compressed already.
    """
    named = [(plain_name(name), each) for name, each in model.named_modules()]
    modules = {name: each for name, each in named if isinstance(each, FSDPModule)}
    attached = (
        ("gradients", gradients, AttachPoint.FSDP_GRADIENTS),
        ("parameters", parameters, AttachPoint.FSDP_PARAMETERS),
    )
    problems = [
        validation_error_at(place, each, name) for name, each, place in attached if each is not None
    ]
    problems += [_validation_error(modules), find_policy_error(nonfinite)]
    problem = next((each for each in problems if each), None)
    config_fields = [(key, repr(each)) for key, each, _ in attached]
    config_fields.append(("nonfinite", str(nonfinite)))
    check_consistent_across_ranks(
        [*config_fields, ("modules", ", ".join(modules))], problem, process_group
    )
    places: dict[str, dict[str, _CompressedCollective]] = {"gradients": {}, "parameters": {}}
    uncompressed: list[_PlainReduceScatter | _PlainAllGather] = []
    backends = dist.get_backend_config(process_group)
    waits = "gloo" in backends and "nccl" not in backends
    for name, module in modules.items():
        if waits and gradients is None and parameters is not None:
            uncompressed.append(plain_scatter := _PlainReduceScatter())
            module.set_custom_reduce_scatter(plain_scatter)
        if waits and parameters is None and gradients is not None:
            uncompressed.append(plain_gather := _PlainAllGather())
            module.set_custom_all_gather(plain_gather)
        if gradients is not None:
            own = _parameters_of(model, name, modules)
            scatter = CompressedReduceScatter(gradients, name, nonfinite, own)
            places["gradients"][name] = scatter
            module.set_custom_reduce_scatter(scatter)
        if parameters is not None:
            gather = places["parameters"][name] = fsdp_all_gather(parameters, name)
            module.set_custom_all_gather(gather)
        if gradients is not None or parameters is not None:
            vars(module)[_MARK] = True
    compression = FSDPCompression(places, uncompressed, process_group)
    model.register_forward_pre_hook(lambda *_: compression.begin_step(), prepend=True)
    return compression


def _parameters_of(
    model: nn.Module, name: str, modules: dict[str, FSDPModule]
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a module shards itself, by their names in the model."""

    def owner(parameter_name: str) -> str:
        above = [
            each for each in modules if not each or f"{parameter_name}.".startswith(f"{each}.")
        ]
        return max(above, key=len, default="")

    return [(each, p) for each, p in model.named_parameters() if owner(each) == name]


def _validation_error(modules: dict[str, FSDPModule]) -> str | None:
    if not modules:
        return "model must have modules that fully_shard was applied to, got none: apply it first"
    marked = [name for name, module in modules.items() if _MARK in vars(module)]
    if marked:
        return f"model must not be compressed already, got one whose module {marked[0]!r} is"
    return None


def _check_supported(compressor: Compressor, place: AttachPoint) -> None:
    problem = validation_error_at(place, compressor)
    if problem is not None:
        raise problem if isinstance(problem, TypeError) else ValueError(problem)


def _factor_of(op: _ReduceOp, num_ranks: int) -> float:
    """Return the factor of a sum over ranks."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / num_ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        reduce_state: Any = op.__getstate__()  # the only access to the factor
        return float(reduce_state[1])
    raise ValueError(f"op must be SUM, AVG or PREMUL_SUM, got {op}")
