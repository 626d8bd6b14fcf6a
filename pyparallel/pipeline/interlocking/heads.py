"""Heads of interlocking backpropagation, which give the stages inside the model a loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from ...training import summarize
from ...training.arguments import require
from ..messages import Value


class Head(ABC):
    """Builds the module that maps a stage's output to the ``output`` of ``loss_fn``.

    A head learns from its own loss alone (arXiv 2010.04116). Builders are immutable; ranks compare
    their ``repr``, so it must name all arguments.
    """

    @property
    def shared(self) -> nn.Parameter | None:
        """Return the model's weight of ``module(value, weight)``; None: called with the value."""
        return None

    @abstractmethod
    def build(self, example: Value) -> nn.Module:
        """Build a new module, initialized from torch's global CPU generator.

        ``example`` is an output of the stage, of any batch size; the module is on its device and in
        its dtype. A head that does not fit it is a ValueError.
        """

    def _check(self, example: Value, shape: str, *, fits: bool) -> Tensor:
        """Return the example if it is a floating-point tensor that ``fits`` the rule ``shape``."""
        if isinstance(example, Tensor) and fits and example.is_floating_point():
            return example
        raise ValueError(
            f"heads must fit the outputs of their stages: {self!r} takes a floating-point tensor "
            f"{shape}, got {_describe(example)}; split the model elsewhere, or give an nn.Module"
        )


@dataclass(frozen=True)
class GivenHead(Head):
    """A head given as a module, which maps its stage's output to the ``output`` of ``loss_fn``."""

    module: nn.Module

    @override
    def build(self, example: Value) -> nn.Module:
        return self.module


Heads = Head | nn.Module | Sequence[Head | nn.Module]


def as_heads(heads: object, num_stages: int) -> tuple[Head, ...]:
    """Return one builder for every stage but the last; a ValueError of other heads.

    A builder alone is for all stages; an ``nn.ModuleList`` is a list of heads, as other lists are.
    """
    last = num_stages - 1
    each_stage = f"for each of stages 0 to {last - 1}" if last > 1 else "for stage 0"
    each_stage = each_stage if last else "for each stage but the last, none for a single one"
    given: list[Any]
    if isinstance(heads, Head):
        given = [heads] * last
    elif isinstance(heads, Sequence | nn.ModuleList) and not isinstance(heads, str):
        given = list(heads)
    else:
        rule = f"heads must be a head, or a list of one {each_stage}"
        require(isinstance(heads, nn.Module), rule, summarize(heads))
        given = [heads]
    rule, found = f"heads must hold one head {each_stage}", len(given)
    require(found >= last, rule, f"{found}: stage {found} has none")
    place = "last" if last else "only one"
    require(found <= last, rule, f"{found}: stage {last} is the {place}, which has the loss itself")
    for stage, head in enumerate(given):
        rule = "heads must hold builders such as LinearHead(10) and modules"
        require(isinstance(head, Head | nn.Module), rule, f"{summarize(head)} for stage {stage}")
    _check_apart(given)
    return tuple(each if isinstance(each, Head) else GivenHead(each) for each in given)


def _check_apart(given: Sequence[object]) -> None:
    first: dict[int, int] = {}
    for stage, head in enumerate(given):
        for part in (head, *head.parameters()) if isinstance(head, nn.Module) else ():
            other = first.setdefault(id(part), stage)
            what = "module" if part is head else "parameter"
            rule = f"heads must not share a {what}, as each learns from its own loss"
            got = f"the same one for stages {other} and {stage}"
            require(other == stage, rule, f"{got}: give a builder, or copy.deepcopy it")


def _describe(value: Value) -> str:
    if not isinstance(value, Tensor):
        return f"a tuple of {len(value)} tensors"
    return f"one of shape {list(value.shape)} and {value.dtype}"
