"""The split of a model into stages: the user's, or by profiling."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from ...comm import Collectives, DisagreementError, Run, device_of
from ...training.arguments import check_type, require
from ..runtime.inputs import Inputs
from .profile import profile_layers
from .solver import Split, balance, check_num_stages


def check_split(split: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Raise a ValueError unless a split divides so many layers into so many stages."""
    check_num_stages(num_layers, num_stages)
    check_type(
        "split", split, (Sequence,), "a list of the first layer of each stage after the first"
    )
    given = list(split)
    wanted = f"{num_stages - 1} indices for {num_stages} stages"
    rule = f"split must hold the first layer of each stage after the first, {wanted}"
    require(len(given) == num_stages - 1, rule, f"{len(given)}: {given}")
    are_integers = all(isinstance(index, int) for index in given)
    require(are_integers, "split must hold integers", str(given))
    ascends = all(a < b for a, b in pairwise([0, *given, num_layers]))
    rule = f"split must ascend, from 1 or more to {num_layers - 1} or less, so that every stage"
    require(ascends, f"{rule} has one of the {num_layers} layers", str(given))


def split_automatically(
    layers: Sequence[nn.Module], example: Inputs | None, num_stages: int, run: Run | None = None
) -> Split:
    """Profile the layers on rank 0 and balance the stages; return the same split on all ranks.

    All ranks must call this; the others need no ``example``, a microbatch. Layers that share
    parameters, and those between them, stay on one stage, if that leaves enough others for all
    stages. Without a ``run`` the default group is used, or a single process. A layer that failed is
    an error on all ranks.
    """
    alone, run = not dist.is_initialized(), run or Run()
    split: Split = ()
    problem, cause = None, None
    if run.group_rank == 0:
        try:
            split = _decide(layers, example, num_stages, run.size)
        except Exception as error:  # may occur on this rank alone: report it to the others
            problem, cause = str(error).partition("\n")[0] or type(error).__name__, error
    if alone:
        if cause is not None:
            raise ValueError(problem) from cause
        return split
    config_fields = [("number of layers", repr(len(layers))), ("num_stages", repr(num_stages))]
    try:
        run.agree(config_fields, problem)
    except DisagreementError as error:
        raise error from cause
    places = split or [0] * (num_stages - 1)
    shared = torch.tensor(places, dtype=torch.int64, device=device_of(run.group))
    Collectives(run).broadcast_(shared, 0)
    received: list[int] = shared.tolist()
    check_split(received, len(layers), num_stages)
    return tuple(received)


def _decide(
    layers: Sequence[nn.Module], example: Inputs | None, num_stages: int, num_ranks: int
) -> Split:
    check_num_stages(len(layers), num_stages)
    begins = _separable(layers)
    if len(begins) < num_stages:  # as with an embedding that is tied to the last layer
        begins = list(range(len(layers)))
    if example is None:
        raise ValueError("example must be a microbatch on the rank of the first stage, got None")
    seconds = [cost.seconds for cost in profile_layers(layers, example)]
    costs = [sum(seconds[begin:end]) for begin, end in pairwise([*begins, len(layers)])]
    return tuple(begins[index] for index in balance(costs, num_stages, num_ranks=num_ranks))


def _separable(layers: Sequence[nn.Module]) -> list[int]:
    """Return 0 and the layers before which a cut leaves no parameter on both sides."""
    last = {p: index for index, layer in enumerate(layers) for p in layer.parameters()}
    begins, together = [], 0
    for index, layer in enumerate(layers):
        if index >= together:
            begins.append(index)
        together = max([together, *(last[p] + 1 for p in layer.parameters())])
    return begins
