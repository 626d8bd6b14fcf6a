"""The heads of interlocking backpropagation: what gives a stage inside the model a loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...comm import Value


class Head(ABC):
    """Builds the module that maps what a stage hands on to what ``loss_fn`` takes as output.

    A head learns from its own loss alone (arXiv 2010.04116). Builders are immutable, and their
    ``repr`` says all that ranks must have in common.
    """

    @property
    def shared(self) -> nn.Parameter | None:
        """A weight of the model that the module is called with: ``module(value, weight)``.

        None: it is called with the value alone.
        """
        return None

    @abstractmethod
    def build(self, example: Value) -> nn.Module:
        """A new module, initialized as torch does it, from the global generator of the CPU.

        Args:
            example: what the stage hands on, of any number of samples.

        Returns:
            The module, on the example's device and in its dtype.

        Raises:
            ValueError: the head does not fit it.
        """

    def _check(self, example: Value, shape: str, *, fits: bool) -> Tensor:
        """The example, if it is one floating-point tensor and ``fits``; ``shape`` says the rule."""
        if isinstance(example, Tensor) and fits and example.is_floating_point():
            return example
        raise ValueError(
            f"heads must fit what their stages hand on: {self!r} takes a floating-point tensor "
            f"{shape}, got {_describe(example)}; cut the model elsewhere, or give an nn.Module"
        )


@dataclass(frozen=True)
class GivenHead(Head):
    """A module of the user's, as it stands.

    Args:
        module: maps what its stage hands on to what ``loss_fn`` takes.
    """

    module: nn.Module

    def build(self, example: Value) -> nn.Module:
        """The module itself."""
        return self.module


Heads = Head | nn.Module | Sequence[Head | nn.Module]


def as_heads(heads: Heads, num_stages: int) -> tuple[Head, ...]:
    """One builder for every stage but the last.

    Args:
        heads: a builder that serves for all; or a list of builders and modules, stage by stage.
            An ``nn.ModuleList`` is such a list, any other module a single head.
        num_stages: of the model.

    Raises:
        ValueError: as ``check_heads`` says.
    """
    problem = check_heads(heads, num_stages)
    if problem is not None:
        raise ValueError(problem)
    given = _by_stage(heads, num_stages)
    return tuple(each if isinstance(each, Head) else GivenHead(each) for each in given)


def check_heads(heads: object, num_stages: int) -> str | None:
    """What is wrong with the heads of so many stages, as a sentence; None: nothing."""
    if not isinstance(heads, Head | nn.Module | Sequence) or isinstance(heads, str):
        return f"heads must be a head, or a list of one {_for_each(num_stages)}, got {heads!r}"
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
            f"stage {wanted} is {'the last, which has' if wanted else 'all there is, and has'} the "
            "loss itself"
        )
    return _find_stranger(given) or _find_twins(given)


def _by_stage(heads: object, num_stages: int) -> list[Head | nn.Module]:
    """What is given for each stage; of whatever type, as it may yet be wrong."""
    if isinstance(heads, Head):
        return [heads] * (num_stages - 1)
    if isinstance(heads, nn.ModuleList):
        return list(heads)
    if isinstance(heads, nn.Module):
        return [heads]
    assert isinstance(heads, Sequence)
    return list(heads)


def _for_each(num_stages: int) -> str:
    """The stages that want a head, in words."""
    if num_stages < 2:
        return "for each stage but the last, none for a single one"
    if num_stages == 2:
        return "for stage 0"
    return f"for each of stages 0 to {num_stages - 2}"


def _find_stranger(given: list[Head | nn.Module]) -> str | None:
    """The first thing that is no head."""
    for stage, head in enumerate(given):
        if not isinstance(head, Head | nn.Module):
            what = f"the class {head.__name__}" if isinstance(head, type) else repr(head)
            return (
                f"heads must hold builders such as LinearHead(10) and modules, got {what} for "
                f"stage {stage}"
            )
    return None


def _find_twins(given: list[Head | nn.Module]) -> str | None:
    """The first two stages whose heads are one module, or have a parameter in common."""
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
