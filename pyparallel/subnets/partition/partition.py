"""What is cut, and who gets which part of it: the policy, without a process and without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from .chain import Chain
from .layers import join
from .rules import Rule
from .sampling import draw
from .width import CutDim

Rules = Mapping[str, Rule | Sequence[Rule]]


@dataclass(frozen=True)
class Partition:
    """Which units of a model are dealt out among the subnets, and the draw that deals them.

    In every round each width is permuted by itself and cut into as many pieces as there are ranks
    (independent subnetwork training: Yuan, Wolfe, Dun, Tang, Kyrillidis, Jermaine, arXiv
    1910.02120). Piece i has as many units in every round, so shapes persist; pieces differ by at
    most one unit. All ranks draw alike, so no index travels.

    Args:
        rules: which submodules are cut, and how: from names to a rule or several. A name may have
            the wildcards of ``fnmatch`` in each of its parts ("blocks.*" are the children of
            blocks, not theirs); "" is the model itself. What no rule names stays whole. None
            infers the widths of a chain of layers: ``{"": Chain()}``.
        seed: of the draws.
    """

    rules: Rules | None = None
    seed: int = 0
    _items: tuple[tuple[str, tuple[Rule, ...]], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rules: Rules = {"": Chain()} if self.rules is None else self.rules
        items = tuple(
            (pattern, tuple(rule) if isinstance(rule, Sequence) else (rule,))
            for pattern, rule in rules.items()
        )
        object.__setattr__(self, "_items", items)

    def widths(self, module: nn.Module) -> list[CutDim]:
        """All widths that are cut, each place checked against the model.

        Raises:
            ValueError: something that cannot be cut, by name, and what to declare.
        """
        found: list[CutDim] = []
        for pattern, rules in self._items:
            paths = [path for path, _ in module.named_modules() if _matches(path, pattern)]
            if not paths:
                children = ", ".join(repr(name) for name, _ in module.named_children())
                raise ValueError(
                    f"rules must name submodules, got {pattern!r}, which matches none; there: "
                    f"{children}"
                )
            for path in paths:
                for rule in rules:
                    found += rule.widths(module.get_submodule(path), path)
        if not found:
            raise ValueError("rules must cut something, got none")
        _check(found, module)
        return found

    def draw(
        self, widths: Sequence[CutDim], round_index: int, num_subnets: int
    ) -> dict[str, list[Tensor]]:
        """Each subnet's units of every width, ascending, in a round."""
        return {
            width.name: draw(
                width.name, width.units, num_subnets, seed=self.seed, round_index=round_index
            )
            for width in widths
        }


def find_narrow(widths: Sequence[CutDim], num_subnets: int) -> str | None:
    """What is wrong with cutting into so many subnets, or None."""
    for width in widths:
        if width.units < num_subnets:
            return (
                f"the number of ranks must be at most that of units of every width, got "
                f"{num_subnets} ranks and {width.name} with {width.units} units; leave it out of "
                "the rules or use fewer ranks"
            )
    return None


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check(widths: Sequence[CutDim], module: nn.Module) -> None:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shared = _names_of_shared(module)
    taken: dict[tuple[str, int], str] = {}
    for width in widths:
        for place in width.places:
            if place.tensor in shared:
                raise ValueError(
                    f"a parameter that is cut must be used once, got {place.tensor}, which is also "
                    f"{shared[place.tensor]}; untie them, or leave it out of the rules"
                )
            if (place.tensor, place.dim) in taken:
                raise ValueError(
                    f"dimension {place.dim} of {place.tensor} must be cut by one rule, got those "
                    f"of {taken[place.tensor, place.dim]} and {width.name}"
                )
            taken[place.tensor, place.dim] = width.name
            assert tensors[place.tensor].shape[place.dim] == place.length(width.units), place


def _names_of_shared(module: nn.Module) -> dict[str, str]:
    """From each name of a parameter or buffer that has another to that other."""
    names: dict[int, list[str]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                names.setdefault(id(tensor), []).append(join(path, key))
    several = [them for them in names.values() if len(them) > 1]
    return {name: next(o for o in them if o != name) for them in several for name in them}
