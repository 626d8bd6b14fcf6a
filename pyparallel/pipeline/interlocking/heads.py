"""Heads of interlocking backpropagation, which give the stages inside the model a loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from ...training import summarize
from ..messages import Value


class Head(ABC):
    """Builds the module that maps a stage's output to the ``output`` of ``loss_fn``.

    A head learns from its own loss alone (arXiv 2010.04116). Builders are immutable; ranks compare
    their ``repr``, so it must name all arguments.
    """

    @property
    def shared(self) -> nn.Parameter | None:
        """Return the model's weight that the module is called with: ``module(value, weight)``.

        None: it is called with the value alone.
        """
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


def as_heads(heads: Heads, num_stages: int) -> tuple[Head, ...]:
    """Return one builder for every stage but the last, or raise the error of ``check_heads``.

    ``heads`` is a builder for all stages; or a list of builders and modules, stage by stage. An
    ``nn.ModuleList`` is such a list, any other module a single head.
    """
    problem = check_heads(heads, num_stages)
    if problem is not None:
        raise ValueError(problem)
    given = _by_stage(heads, num_stages)
    return tuple(each if isinstance(each, Head) else GivenHead(each) for each in given)


def check_heads(heads: object, num_stages: int) -> str | None:
    """Return what is wrong with the heads of a model, as a message; None: nothing."""
    if not isinstance(heads, Head | nn.Module | Sequence) or isinstance(heads, str):
        found = summarize(heads)
        return f"heads must be a head, or a list of one {_for_each(num_stages)}, got {found}"
    given = _by_stage(heads, num_stages)
    wanted = num_stages - 1
    if len(given) < wanted:
        return (
            f"heads must hold one head {_for_each(num_stages)}, got {len(given)}: "
            f"stage {len(given)} has none"
        )
    if len(given) > wanted:
        return (
            f"heads must hold one head {_for_each(num_stages)}, got {len(given)}: "
            f"stage {wanted} is the {'last' if wanted else 'only one'}, which has the loss itself"
        )
    return _find_invalid(given) or _find_shared(given)


def _by_stage(heads: object, num_stages: int) -> list[Head | nn.Module]:
    """Return the heads by stage, of types not checked yet."""
    if isinstance(heads, Head):
        return [heads] * (num_stages - 1)
    if isinstance(heads, nn.ModuleList):
        return list(heads)
    if isinstance(heads, nn.Module):
        return [heads]
    assert isinstance(heads, Sequence)
    return list(heads)


def _for_each(num_stages: int) -> str:
    if num_stages < 2:
        return "for each stage but the last, none for a single one"
    if num_stages == 2:
        return "for stage 0"
    return f"for each of stages 0 to {num_stages - 2}"


def _find_invalid(given: list[Head | nn.Module]) -> str | None:
    """Return a message about the first value that is no head; None: all are."""
    for stage, head in enumerate(given):
        if not isinstance(head, Head | nn.Module):
            return (
                "heads must hold builders such as LinearHead(10) and modules, got "
                f"{summarize(head)} for stage {stage}"
            )
    return None


def _find_shared(given: list[Head | nn.Module]) -> str | None:
    """Return a message about the first two stages whose heads share a module or parameter."""
    first: dict[int, int] = {}
    for stage, head in enumerate(given):
        if not isinstance(head, nn.Module):
            continue
        for part in (head, *head.parameters()):
            other = first.setdefault(id(part), stage)
            if other != stage:
                what = "module" if part is head else "parameter"
                return (
                    f"heads must not share a {what}, as each learns from its own loss, got the "
                    f"same one for stages {other} and {stage}: give a builder, or copy.deepcopy it"
                )
    return None


def _describe(value: Value) -> str:
    if not isinstance(value, Tensor):
        return f"a tuple of {len(value)} tensors"
    return f"one of shape {list(value.shape)} and {value.dtype}"
