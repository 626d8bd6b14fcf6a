"""What a width is, said for a submodule: hidden units, attention heads, feed-forward units."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from .layers import Layer, join, norm_places
from .width import Count, CutDim, Place


class Rule(Protocol):
    """How a submodule is cut: an immutable object whose ``repr`` says all of it."""

    def widths(self, module: nn.Module, path: str) -> list[CutDim]:
        """The widths of the submodule.

        Args:
            module: the submodule.
            path: its name in the model; names in the rule are relative to it, those in the
                widths are not.

        Raises:
            ValueError: what cannot be cut, by name, and what to declare.
        """


@dataclass(frozen=True)
class Hidden:
    """Units between layers: rows of the producers, columns of the consumers.

    Linear layers and convolutions; several producers side by side make the same units, such as the
    two first layers of a gated feed-forward. A consumer that has k times as many inputs as there
    are units, after a flatten, has k neighboring columns for each.

    Args:
        producers: names within the submodule.
        consumers: names within the submodule.
        norms: BatchNorm, InstanceNorm or PReLU between them.
    """

    producers: str | Sequence[str]
    consumers: str | Sequence[str]
    norms: str | Sequence[str] = ()

    def widths(self, module: nn.Module, path: str) -> list[CutDim]:
        """One."""
        producers = layers_of(self.producers, module, path)
        consumers = layers_of(self.consumers, module, path)
        if not producers or not consumers:
            raise ValueError(f"a width must have a producer and a consumer, got {self}")
        return [
            _join_width(
                producers[0].num_outputs,
                producers,
                consumers,
                [(join(path, name), find(module, name, path)) for name in _names(self.norms)],
            )
        ]


@dataclass(frozen=True)
class FeedForward:
    """Hidden units of a transformer's feed-forward: those between two Linear layers.

    Args:
        expand: the first layer's name within the submodule, or several in a gated one.
        contract: the second layer's.
    """

    expand: str | Sequence[str]
    contract: str

    def widths(self, module: nn.Module, path: str) -> list[CutDim]:
        """One."""
        for layer in layers_of([*_names(self.expand), self.contract], module, path):
            if not layer.is_linear:
                raise ValueError(f"a feed-forward must be of Linear layers, got {layer.name}")
        return Hidden(self.expand, self.contract).widths(module, path)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads, where attention is written with Linear layers.

    Say ``qkv``, a layer whose outputs are all queries, then all keys, then all values, or the
    three layers by themselves. Within each, the entries of a head are neighbors. A forward that
    asks how large a head is must read it off a tensor: the model's width over the attribute is
    another number in a subnet.

    Args:
        project: the layer that takes all heads' outputs, by its name within the submodule.
        qkv: queries, keys and values in one layer.
        queries: a layer.
        keys: a layer.
        values: a layer.
        attribute: of the submodule: the number of heads, which a subnet has fewer of.
    """

    project: str
    qkv: str | None = None
    queries: str | None = None
    keys: str | None = None
    values: str | None = None
    attribute: str = "num_heads"

    def __post_init__(self) -> None:
        apart = [name is not None for name in (self.queries, self.keys, self.values)]
        if any(apart) if self.qkv is not None else not all(apart):
            raise ValueError(f"heads must have either qkv or queries, keys and values, got {self}")

    def widths(self, module: nn.Module, path: str) -> list[CutDim]:
        """One, whose units are heads."""
        heads = getattr(module, self.attribute, None)
        if not isinstance(heads, int) or heads < 1:
            raise ValueError(
                f"{join(path, self.attribute)} must be the number of heads, got {heads!r}; say "
                "which attribute is: Heads(..., attribute=...)"
            )
        blocks = 1 if self.qkv is None else 3
        apart = [name for name in (self.qkv, self.queries, self.keys, self.values) if name]
        producers = layers_of(apart, module, path)
        (project,) = layers_of(self.project, module, path)
        head_size, rest = divmod(project.num_inputs, heads)
        for layer in [*producers, project]:
            if not layer.is_linear:
                raise ValueError(f"attention must be of Linear layers, got {layer.name}")
        for layer in producers:
            if rest or layer.num_outputs != blocks * heads * head_size:
                raise ValueError(
                    f"the outputs of {layer.name} must be {blocks} x {heads} heads of the size "
                    f"that {project.name} takes ({project.num_inputs} / {heads}), got "
                    f"{layer.num_outputs}; heads that share keys and values cannot be cut"
                )
        places, counts = [], [Count(path, self.attribute)]
        for layer in producers:
            found, count = layer.outputs(head_size, blocks)
            places += found
            counts.append(count)
        found, count = project.inputs(head_size)
        return [
            CutDim(
                producers[0].name,
                heads,
                (*places, *found),
                (*counts, count),
                (project.name,),
            )
        ]


def layers_of(names: str | Sequence[str], module: nn.Module, path: str) -> list[Layer]:
    """The layers of these names within a submodule.

    Raises:
        ValueError: there is none, or it cannot be cut.
    """
    return [Layer(join(path, name), find(module, name, path)) for name in _names(names)]


def find(module: nn.Module, name: str, path: str) -> nn.Module:
    """The submodule of a name.

    Raises:
        ValueError: there is none.
    """
    try:
        return module.get_submodule(name)
    except AttributeError:
        there = ", ".join(key for key, _ in module.named_children()) or "nothing"
        raise ValueError(
            f"a rule must name submodules of {path or 'the module'}, got {name!r}; there: {there}"
        ) from None


def _join_width(
    units: int,
    producers: Sequence[Layer],
    consumers: Sequence[Layer],
    norms: Sequence[tuple[str, nn.Module]],
) -> CutDim:
    places: list[Place] = []
    counts: list[Count] = []
    for layer in producers:
        if layer.num_outputs != units:
            raise ValueError(
                f"producers of one width must have as many units, got {producers[0].name} with "
                f"{units} and {layer.name} with {layer.num_outputs}"
            )
        found, count = layer.outputs()
        places += found
        counts.append(count)
    for name, norm in norms:
        found, several = norm_places(name, norm, units)
        places += found
        counts += several
    for layer in consumers:
        if layer.num_inputs % units:
            raise ValueError(
                f"a consumer must have a multiple of the {units} units of {producers[0].name} as "
                f"inputs, got {layer.name} with {layer.num_inputs}"
            )
        found, count = layer.inputs(layer.num_inputs // units)
        places += found
        counts.append(count)
    names = tuple(layer.name for layer in consumers)
    return CutDim(producers[0].name, units, tuple(places), tuple(counts), names)


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
