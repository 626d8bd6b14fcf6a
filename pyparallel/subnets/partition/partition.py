"""Which units are cut and which subnet trains them, independent of processes and models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from ...training import has_methods, wrong_type
from ...training.arguments import check_type, require
from .chain import SequentialChain
from .cut_dim import CutDim
from .layers import join
from .rules import Rule
from .unit_assignment import draw_units

Rules = Mapping[str, Rule | Sequence[Rule]]


@dataclass(frozen=True)
class Partition:
    """The units of a model that are divided among the subnets, and their random assignment.

    In every round the units of each cut dimension are permuted independently and split into one
    piece per rank (independent subnetwork training: Yuan, Wolfe, Dun, Tang, Kyrillidis, Jermaine,
    arXiv 1910.02120). Piece i has the same number of units in every round, so shapes persist;
    pieces differ by at most one unit. All ranks draw the same permutations, so no indices are sent.

    Args:
        rules: from submodule names to a rule or several. A name may have the wildcards of
            ``fnmatch`` in each of its parts ("blocks.*" are the children of blocks, not their
            children); "" is the model itself. Modules that no rule names are not cut. None infers
            the hidden dimensions of an ``nn.Sequential``: ``{"": SequentialChain()}``.
    """

    rules: Rules | None = None
    seed: int = 0
    _items: tuple[tuple[str, tuple[Rule, ...]], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rules: Rules = {"": SequentialChain()} if self.rules is None else self.rules
        kind = 'rules by the names of submodules such as {"": SequentialChain()}, or None'
        check_type("rules", rules, Mapping, kind)
        items = tuple(
            (pattern, tuple(rule) if isinstance(rule, list | tuple) else (rule,))
            for pattern, rule in rules.items()
        )
        object.__setattr__(self, "_items", items)
        for pattern, chosen in items:
            for rule in chosen:
                if not has_methods(rule, "cut_dims"):
                    example = 'a rule such as FeedForward("up", "down") or a list of them'
                    raise wrong_type(f"rules[{pattern!r}]", example, rule)

    def cut_dims(self, module: nn.Module) -> list[CutDim]:
        """Return all cut dimensions, each place checked against the model.

        A ValueError names a module or parameter that cannot be cut, and what to declare.
        """
        found: list[CutDim] = []
        for pattern, rules in self._items:
            paths = [path for path, _ in module.named_modules() if _matches(path, pattern)]
            if not paths:
                children = ", ".join(repr(name) for name, _ in module.named_children())
                raise ValueError(
                    f"rules must name submodules, got {pattern!r}, which matches none; children of "
                    f"the module: {children}"
                )
            for path in paths:
                for rule in rules:
                    found += rule.cut_dims(module.get_submodule(path), path)
        require(found, "rules must cut something", "none")
        _check(found, module)
        return found

    def draw(
        self, cut_dims: Sequence[CutDim], round_index: int, num_subnets: int
    ) -> dict[str, list[Tensor]]:
        """Return each subnet's units in a round, ascending, by the name of the cut dimension."""
        return {
            cut_dim.name: draw_units(
                cut_dim.name, cut_dim.units, num_subnets, seed=self.seed, round_index=round_index
            )
            for cut_dim in cut_dims
        }


def find_units_error(cut_dims: Sequence[CutDim], num_subnets: int) -> str | None:
    """Return why the units cannot be divided among ``num_subnets`` subnets, or None."""
    for cut_dim in cut_dims:
        if cut_dim.units < num_subnets:
            return (
                f"every cut dimension must have at least one unit per rank, got {num_subnets} "
                f"ranks and {cut_dim.name} with {cut_dim.units} units; leave it out of the rules "
                "or use fewer ranks"
            )
    return None


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check(cut_dims: Sequence[CutDim], module: nn.Module) -> None:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shared = _names_of_shared(module)
    taken: dict[tuple[str, int], str] = {}
    for cut_dim in cut_dims:
        for place in cut_dim.places:
            rule, name = "a parameter that is cut must be used once", place.tensor
            got = f"{name}, which is also {shared.get(name)}"
            require(name not in shared, rule, got, "untie them, or do not cut it")
            rule = f"dimension {place.dim} of {name} must be cut by one rule"
            got = f"those of {taken.get((name, place.dim))} and {cut_dim.name}"
            require((name, place.dim) not in taken, rule, got)
            taken[place.tensor, place.dim] = cut_dim.name
            assert tensors[place.tensor].shape[place.dim] == place.length(cut_dim.units), place


def _names_of_shared(module: nn.Module) -> dict[str, str]:
    """Return, for each name of a tensor that has several names, one of the others."""
    names: dict[int, list[str]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                names.setdefault(id(tensor), []).append(join(path, key))
    several = [them for them in names.values() if len(them) > 1]
    return {name: next(o for o in them if o != name) for them in several for name in them}
