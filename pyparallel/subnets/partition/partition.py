"""Which units are cut and which subnet trains them, independent of processes and models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from ...training import has_methods, wrong_type
from ...training.arguments import check_integer, check_type, require
from .chain import SequentialChain
from .cut_dim import CutDim
from .layers import join
from .rules import Rule
from .unit_assignment import draw_units

Rules = Mapping[str, Rule | Sequence[Rule]]


@dataclass(frozen=True, repr=False)
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
        seed: of the draws.
        copies: how many ranks have each unit, a divisor of their number. Neighboring ranks, this
            many, train the same subnet with as many times more units, and a merge averages them. 1:
            the paper's; all ranks: local SGD, which averages optimizer state that is carried, too.
    """

    rules: Rules | None = None
    seed: int = 0
    copies: int = 1
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
        check_integer("copies", self.copies, rule="a positive number of ranks")
        for pattern, chosen in items:
            for rule in chosen:
                if not has_methods(rule, "cut_dims"):
                    example = 'a rule such as FeedForward("up", "down") or a list of them'
                    raise wrong_type(f"rules[{pattern!r}]", example, rule)

    def __repr__(self) -> str:
        """Show copies if there are several: saved runs compare it with those of before."""
        copies = f", copies={self.copies!r}" if self.copies != 1 else ""
        return f"Partition(rules={self.rules!r}, seed={self.seed!r}{copies})"

    def subnet_of(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return which subnet a rank trains, and of how many."""
        return rank // self.copies, num_ranks // self.copies

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
        self, cut_dims: Sequence[CutDim], round_index: int, num_ranks: int
    ) -> dict[str, list[Tensor]]:
        """Return each rank's units in a round, ascending, by the name of the cut dimension."""
        subnets = [self.subnet_of(rank, num_ranks) for rank in range(num_ranks)]
        num_subnets = subnets[0][1]
        found = {}
        for dim in cut_dims:
            pieces = draw_units(
                dim.name, dim.units, num_subnets, seed=self.seed, round_index=round_index
            )
            found[dim.name] = [pieces[subnet] for subnet, _ in subnets]
        return found

    def find_units_error(self, cut_dims: Sequence[CutDim], num_ranks: int) -> str | None:
        """Return why the units cannot be divided among the ranks, or None."""
        if num_ranks % self.copies:
            return (
                "copies of Partition must divide the number of ranks, got "
                f"{self.copies} copies and {num_ranks} ranks"
            )
        num_subnets = num_ranks // self.copies
        for cut_dim in cut_dims:
            if cut_dim.units < num_subnets:
                got = f"{num_ranks} ranks" if self.copies == 1 else f"{num_subnets} subnets"
                per = "rank" if self.copies == 1 else "subnet"
                return (
                    f"every cut dimension must have at least one unit per {per}, got {got} and "
                    f"{cut_dim.name} with {cut_dim.units} units; leave it out of the rules "
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
