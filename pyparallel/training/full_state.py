"""The state of the whole model, in the CPU's memory of one rank."""

from typing import Any

from torch import Tensor, nn

from ..comm import Run
from .shards import is_sharded


def full_state(module: nn.Module, run: Run) -> dict[str, Any]:
    """Return copies of a module's state, with whole DTensors, on rank 0 of all; {} elsewhere."""
    runs = [run] if run.replica is None else [run, run.replica]
    is_first = all(each.group_rank == 0 for each in runs)
    state = {}
    for name, value in module.state_dict().items():
        whole = value.full_tensor() if is_sharded(value) else value  # by all ranks of a replica
        if is_first:
            state[name] = on_cpu(whole)
    return state


def on_cpu(value: Any) -> Any:
    """Return a copy of a tensor in the CPU's memory, of any other value itself."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
