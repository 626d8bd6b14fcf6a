"""Compressed gradients and parameters in FSDP2: a custom reduce-scatter and all-gather."""

import math
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...comm import check_consistent_across_ranks
from ...comm.errors import concise
from ...comm.stats import CommStats
from ...training import check_on_all_ranks, plain_name, summarize
from ...training.arguments import raise_problem, require
from ...training.nonfinite import NonFinitePolicy, find_policy_error
from ..compressor import AttachPoint, Compressor, find_error_at
from .ddp import metrics_of
from .fsdp_custom import (
    CompressedAllGather,
    CompressedReduceScatter,
    _CompressedCollective,
    _PlainAllGather,
    _PlainReduceScatter,
    _Step,
)

_MARK = "_compressed_by_pyparallel"


def fsdp_reduce_scatter(
    compressor: Compressor, name: str = "module", *, nonfinite: NonFinitePolicy = "raise"
) -> CompressedReduceScatter:
    """Return a compressed collective for ``FSDPModule.set_custom_reduce_scatter``.

    Each rank encodes its whole unsharded gradient once, sends each rank its shard, and sums the
    received shards in float32. Residuals are of the unsharded gradient, 4 bytes an entry: as much
    memory as FSDP saves by sharding gradients. In a process group of one rank FSDP2 calls no
    collective. In HSDP, gradients are compressed within each replica; the all-reduce between
    replicas, of shards, stays PyTorch's own.

    Both arguments are the same on all ranks; the ``name`` of the module seeds random draws. The
    collective is for this module alone, which keeps the last one it was given, as in PyTorch.
    """
    problem = find_error_at(AttachPoint.FSDP_GRADIENTS, compressor)
    raise_problem(problem or find_policy_error(nonfinite))
    return CompressedReduceScatter(compressor, name, nonfinite)


def fsdp_all_gather(compressor: Compressor, name: str = "module") -> CompressedAllGather:
    """Return a compressed collective for ``FSDPModule.set_custom_all_gather``.

    Every rank computes with decoded parameters, its own shard included, so all ranks have the same
    bits; the optimizer updates the uncompressed shards (arXiv 2302.02497 and arXiv 2306.10209 train
    this way with 8 bits). A stochastic compressor gives backward other parameters than forward,
    since they are gathered twice: ``fully_shard(..., reshard_after_forward=False)`` gathers once.

    Arguments and what is returned are as of `fsdp_reduce_scatter`.
    """
    raise_problem(find_error_at(AttachPoint.FSDP_PARAMETERS, compressor))
    return CompressedAllGather(compressor, name)


class FSDPCompression:
    """State of a model's compressed collectives; `compress_fsdp` creates it."""

    def __init__(
        self,
        places: dict[str, dict[str, _CompressedCollective]],
        step: _Step,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._places = places
        self._group = process_group
        self._step = step
        self._sent_before = 0.0  # bytes, in the steps before
        self._num_steps = 0

    @property
    def last_step(self) -> CommStats:
        """Bytes and seconds of this rank since the last forward pass began."""
        return self._step.stats

    @property
    def residual_norm(self) -> float:
        """Euclidean norm of all gradient residuals; 0 without error feedback."""
        places = self._places.values()
        return math.hypot(*(each.residual_norm for mine in places for each in mine.values()))

    def metrics(self) -> dict[str, float]:
        """Return what this rank has measured, under names for TensorBoard, W&B or ``log_dict``.

        As of ``GradientCompression.metrics``, of compressed collectives alone. The last step, and
        ``last_step``, begin with the last forward pass; ``rank/steps`` are forward passes.
        """
        stats, norm = self._step.stats, self.residual_norm
        return metrics_of(stats, self._sent_before, norm, self._num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: {"gradients" or "parameters": {module: state}}."""
        return {
            place: {name: each.state_dict() for name, each in modules.items()}
            for place, modules in self._places.items()
        }

    @concise
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this rank between steps, to resume bit for bit; all call it.

        States that are damaged, of other modules or another compressor, or of different steps are a
        DisagreementError on all ranks, which have changed nothing; of other shapes or numbers of
        ranks, an error of the next step.
        """
        check_on_all_ranks(
            lambda: self._check_state(state),
            partial(check_consistent_across_ranks, process_group=self._group),
        )
        for place, mine in self._places.items():
            for name, each in mine.items():
                each.load_state_dict(state[place][name])

    def _check_state(self, state: Any) -> list[tuple[str, str]]:
        rule = f"state must be a result of state_dict(), with {' and '.join(self._places)}"
        got = summarize(state)
        require(isinstance(state, dict) and set(state) == set(self._places), rule, got)
        fields = []
        for place, mine in self._places.items():
            rule = f"state must be of the {place} of the modules {sorted(mine)}"
            require(set(state[place]) == set(mine), rule, f"one of {sorted(state[place])}")
            for name, each in mine.items():
                fields += each.check(state[place][name])
        return fields

    def begin_step(self) -> None:
        """Count a step, which begins with a forward pass, and reset the statistics."""
        self._sent_before += self._step.stats.wire_bytes
        self._step.begin(self._num_steps)
        self._num_steps += 1


@concise
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
    The state follows the names of parameters: the residual of one that is frozen, or that a step
    does not use, is kept until it has a gradient again.
    All ranks of the group must call it, once.

    Gradients with a nan or an inf: ``nonfinite`` as of `compress_ddp`, with the unsharded gradients
    of a module in place of a bucket.

    Args:
        model: with modules that ``fully_shard`` has been applied to.
        gradients: the compressor of reduce-scatters; None: uncompressed.
        parameters: the compressor of all-gathers, without error feedback; None: uncompressed.
        process_group: all ranks that have the model; None: the default group.

    A compressor that does not support FSDP2, an argument that is invalid or differs between ranks,
    and a model without such modules or compressed already are a DisagreementError.
    """
    named = [(plain_name(name), each) for name, each in model.named_modules()]
    modules = {name: each for name, each in named if isinstance(each, FSDPModule)}
    attached = (
        ("gradients", gradients, AttachPoint.FSDP_GRADIENTS),
        ("parameters", parameters, AttachPoint.FSDP_PARAMETERS),
    )
    problems = [
        find_error_at(place, each, name) for name, each, place in attached if each is not None
    ]
    problems += [_validation_error(modules), find_policy_error(nonfinite)]
    problem = next((each for each in problems if each), None)
    config_fields = [(key, repr(each)) for key, each, _ in attached]
    config_fields.append(("nonfinite", str(nonfinite)))
    check_consistent_across_ranks(
        [*config_fields, ("modules", ", ".join(modules))], problem, process_group
    )
    places: dict[str, dict[str, _CompressedCollective]] = {"gradients": {}, "parameters": {}}
    step = _Step()
    backends = dist.get_backend_config(process_group)
    waits = "gloo" in backends and "nccl" not in backends
    for name, module in modules.items():
        if waits and gradients is None and parameters is not None:
            module.set_custom_reduce_scatter(_PlainReduceScatter(step))
        if waits and parameters is None and gradients is not None:
            module.set_custom_all_gather(_PlainAllGather(step))
        if gradients is not None:
            roots = [each for each in modules if not each or f"{name}.".startswith(f"{each}.")]
            root = min(roots, key=len)
            scatter = CompressedReduceScatter(gradients, name, nonfinite, root, step)
            places["gradients"][name] = scatter
            module.set_custom_reduce_scatter(scatter)
        if parameters is not None:
            gather = places["parameters"][name] = CompressedAllGather(parameters, name, step)
            module.set_custom_all_gather(gather)
        if gradients is not None or parameters is not None:
            vars(module)[_MARK] = True
    compression = FSDPCompression(places, step, process_group)
    model.register_forward_pre_hook(lambda *_: compression.begin_step(), prepend=True)
    return compression


def _validation_error(modules: dict[str, FSDPModule]) -> str | None:
    if not modules:
        return "model must have modules that fully_shard was applied to, got none: apply it first"
    marked = [name for name, module in modules.items() if _MARK in vars(module)]
    if marked:
        return f"model must not be compressed already, got one whose module {marked[0]!r} is"
    return None
