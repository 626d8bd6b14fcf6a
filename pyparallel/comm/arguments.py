"""Errors of arguments of a wrong type, in one sentence that never prints a tensor."""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

NonFinitePolicy = Literal["raise", "skip", "allow"]
"""What is done about gradients with a nan or an inf."""

_LONGEST = 100  # characters of a repr
_MOST = 8  # values or keys of a container


def wrong_type(name: str, rule: str, value: object, fix: str = "") -> TypeError:
    """Return the error of an argument of a wrong type.

    Args:
        name: of the argument.
        rule: what it must be, with an example.
        value: what it is.
        fix: what to do instead; of a class, by default, to create an object.
    """
    if isinstance(value, type) and not fix:
        fix = f"create an object, {value.__name__}(...)"
    return TypeError(f"{name} must be {rule}, got {summarize(value)}" + (f"; {fix}" if fix else ""))


def find_policy_error(
    nonfinite: object, policies: Sequence[str] = ("raise", "skip", "allow")
) -> str | None:
    """Return why an argument is no policy for values that are not finite, or None."""
    if isinstance(nonfinite, str) and nonfinite in policies:
        return None
    *first, last = map(repr, policies)
    return f"nonfinite must be {', '.join(first)} or {last}, got {summarize(nonfinite)}"


def find_ddp_error(name: str, module: object) -> TypeError | None:
    """Return the error of a module in DistributedDataParallel, which all-reduces, or None."""
    if not isinstance(module, DistributedDataParallel):
        return None
    return TypeError(
        f"{name} must be the plain module, got DistributedDataParallel; pass ddp.module"
    )


def has_methods(value: object, *names: str) -> bool:
    """Return whether a value is an object, not a class, with these methods."""
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in names)


def summarize(value: object) -> str:
    """Return what an argument is, for an error: types, shapes and keys, equal on all ranks."""
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        if not value:
            return f"an empty {kind}"
        if isinstance(value, Mapping):
            return f"a {kind} with keys {_join([repr(key) for key in value])}"
        return f"a {kind} of {len(value)}: {_join([summarize(each) for each in value])}"
    text = repr(value)
    # An address would differ between ranks.
    if len(text) > _LONGEST or "\n" in text or "tensor(" in text or " at 0x" in text:
        name = getattr(value, "__name__", None)
        text = f"an object of {kind}" if name is None else f"the {kind} {name}"
    return text


def _join(texts: list[str]) -> str:
    rest = len(texts) - _MOST
    return ", ".join(texts[:_MOST]) + (f" and {rest} more" if rest > 0 else "")
