"""The check before a merge that all ranks make the same call, with tensors that can be merged."""

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Call, DisagreementError, NonFiniteError, consistency
from ..comm.counts import describe_call
from ..training.nonfinite import is_finite_on_device
from .subnet_parts import SubnetParts

_MERGE = (Call.STEP, Call.FLUSH)
_FOUND = 5  # the place of the first tensor with a nan or an inf, behind four numbers

States = Mapping[str, Mapping[str, Tensor]]


def check_same_call(
    call: Call,
    round_index: int,
    steps: int,
    parts: SubnetParts,
    optimizer: Optimizer,
    finds_nonfinite: bool,
) -> list[tuple[int, int]]:
    """Check that all ranks make the same call; return each one's call and steps since a merge.

    ``finds_nonfinite``: raise, on all ranks before a merge, for a nan or an inf in what is merged.
    """
    tensors, collectives = parts.tensors, parts.collectives
    state, error = parts.hash_state(optimizer)
    fields = "/".join(f"{name} {what}" for name, what in parts.describe_shared())
    numbers = [round_index, state, steps, zlib.crc32(fields.encode())]
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    states = {} if error is not None else parts.carried_state(optimizer)
    found = torch.full((1,), -1, device=device)
    if finds_nonfinite:
        found = _first_nonfinite(tensors, states, device)
    row = consistency.row_of_call(call, numbers, device)
    row[_FOUND] = found[0]
    with collectives.uncounted():
        gathered = collectives.all_gather(row).tolist()
    consistency.check_same_call(gathered, {*_MERGE, Call.FULL_MODEL}, collectives.run.group)
    if error is not None:
        raise error
    first = gathered[0]
    for rank, other in enumerate(gathered):
        merges = [each[0] in _MERGE for each in (first, other)]
        if not (all(merges) or first[0] == other[0]) or first[1] != other[1]:
            raise DisagreementError(
                f"all ranks must make the same calls, got {_describe(first)} on rank 0 "
                f"and {_describe(other)} on rank {rank}; call flush() on every rank when "
                "its batches have run out, before full_model()"
            )
    if any(first[4] != other[4] for other in gathered):
        with collectives.uncounted():
            collectives.run.agree(parts.describe_shared(), None)
    for rank, other in enumerate(gathered):
        if first[2] != other[2]:
            raise DisagreementError(
                "all ranks must have optimizer state for the same parameters, got different "
                f"ones on ranks 0 and {rank}; give every rank a batch and every parameter a "
                "gradient, or use ResetState()"
            )
    for rank, other in enumerate(gathered):
        if other[_FOUND] >= 0:
            found_in = [name for name, _ in _merged(tensors, states)][int(other[_FOUND])]
            raise NonFiniteError(
                f"parameters must be finite to be merged, got nan or inf from rank {rank} in "
                f"{found_in} in round {int(first[1])}: nothing has been merged; resume all ranks "
                "from a state_dict(), and use nonfinite='skip' to leave out steps whose gradients "
                "are not finite"
            )
    return [(int(row[0]), int(row[3])) for row in gathered]


def _describe(row: list[float]) -> str:
    return f"{describe_call(row)} in round {int(row[1])} after {int(row[3])} steps"


def _first_nonfinite(parts: Mapping[str, Tensor], states: States, device: torch.device) -> Tensor:
    """Return the index of the first tensor to be merged that is not finite, (1,) int64, or -1.

    Buffers may have an inf, as masks do, but no nan.
    """
    verdicts = []
    for _, each in _merged(parts, states):
        is_parameter = isinstance(each, nn.Parameter) or each.requires_grad
        verdicts.append(is_finite_on_device(each.detach(), allow_inf=not is_parameter))
    if not verdicts:
        return torch.full((1,), -1, device=device)
    is_bad = torch.stack(verdicts).logical_not()
    first = is_bad.long().argmax()
    return torch.where(is_bad.any(), first, -1).view(1).to(device)


def _merged(parts: Mapping[str, Tensor], states: States) -> Iterator[tuple[str, Tensor]]:
    for name, part in parts.items():
        yield name, part
        for key, state in states.get(name, {}).items():
            yield f"the optimizer's {key} of {name}", state
