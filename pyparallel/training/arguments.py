"""Checks of arguments: ``<name> must <rule>, got <value>; <fix>``, which never prints a tensor."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_LONGEST = 100  # characters of a repr
_MOST = 8  # values or keys of a container


def wrong_type(name: str, rule: str, value: object, fix: str = "") -> TypeError:
    """Return the error of an argument of a wrong type; ``rule`` is what it must be, an example."""
    if isinstance(value, type) and not fix:
        fix = f"create an object, {value.__name__}(...)"
    return TypeError(f"{name} must be {rule}, got {summarize(value)}" + (f"; {fix}" if fix else ""))


def require(holds: object, rule: str, got: object, fix: str = "") -> None:
    """Raise a ValueError, ``<rule>, got <got>; <fix>``, unless a rule holds; a str is as it is."""
    if not holds:
        text = got if isinstance(got, str) else summarize(got)
        raise ValueError(f"{rule}, got {text}" + (f"; {fix}" if fix else ""))


def check_type(
    name: str, value: object, kind: type | tuple[type, ...], rule: str, fix: str = ""
) -> None:
    """Raise the TypeError of ``wrong_type`` unless a value is an instance."""
    if not isinstance(value, kind):
        raise wrong_type(name, rule, value, fix)


def check_callable(name: str, value: object, rule: str, fix: str = "") -> None:
    """Raise the TypeError of ``wrong_type`` unless a value can be called."""
    if not callable(value):
        raise wrong_type(name, rule, value, fix)


def raise_problem(problem: str | TypeError | None) -> None:
    """Raise a problem that was found with arguments, as a ValueError unless it is a TypeError."""
    if problem is not None:
        raise problem if isinstance(problem, TypeError) else ValueError(problem)


def find_error(check: Callable[[], object]) -> str | TypeError | None:
    """Return what a check of arguments raises, for all ranks to raise; None: nothing."""
    try:
        check()
    except TypeError as error:
        return error
    except ValueError as error:
        return str(error)
    return None


def check_one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise a ValueError unless a value is one of several."""
    require(value in choices, f"{name} must be {one_of(choices)}", repr(value))


def is_integer(value: object, low: int = 1) -> TypeGuard[int]:
    """Return whether a value is an int, not a bool, of at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is an int or a float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_integer(name: str, value: object, low: int = 1, rule: str = "") -> None:
    """Raise a ValueError unless a value ``is_integer``; ``rule`` has the words of its own."""
    default = "a positive integer" if low == 1 else f"an integer of at least {low}"
    require(is_integer(value, low), f"{name} must be {rule or default}", repr(value))


def check_in(name: str, value: float, interval: str) -> None:
    """Raise a ValueError unless a number lies in an interval, such as ``"(0, 1]"``."""
    low, high = map(float, interval[1:-1].split(","))
    above = value > low or (value == low and interval[0] == "[")
    below = value < high or (value == high and interval[-1] == "]")
    require(above and below, f"{name} must be in {interval}", value)


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
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
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


def one_of(choices: Sequence[object]) -> str:
    """Return choices as a sentence names them."""
    *first, last = map(repr, choices)
    return f"{', '.join(first)} or {last}"


def _join(texts: list[str]) -> str:
    rest = len(texts) - _MOST
    return ", ".join(texts[:_MOST]) + (f" and {rest} more" if rest > 0 else "")
