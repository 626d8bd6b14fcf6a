"""Rules that declare what is cut in a submodule: hidden, feed-forward or attention units."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from typing_extensions import override

from ...training.arguments import require
from .cut_dim import Count, CutDim, Place
from .layers import Layer, join, norm_places


class Rule(Protocol):
    """How a submodule is cut: immutable, with a complete ``repr``."""

    def cut_dims(self, module: nn.Module, path: str) -> list[CutDim]:
        """Return the cut dimensions of the submodule, whose name in the model is ``path``.

        Names in the rule are relative to it. A ValueError names a module that cannot be cut, and
        what to declare.
        """


@dataclass(frozen=True)
class Hidden(Rule):
    """Rule for units between layers: rows of the producers, columns of the consumers.

    Supports Linear layers and convolutions. Several producers in parallel compute the same units,
    such as the two first layers of a gated feed-forward. A consumer with k times as many inputs as
    units, after a Flatten, has k neighboring columns for each unit.

    Args:
        producers: names of the layers that compute the units, within the submodule.
        consumers: names of the layers that read them, within the submodule.
        norms: names of BatchNorm, InstanceNorm or PReLU modules between them.
    """

    producers: str | Sequence[str]
    consumers: str | Sequence[str]
    norms: str | Sequence[str] = ()

    @override
    def cut_dims(self, module: nn.Module, path: str) -> list[CutDim]:
        producers = layers_of(self.producers, module, path)
        consumers = layers_of(self.consumers, module, path)
        require(producers and consumers, "Hidden must have a producer and a consumer", str(self))
        norms = [(join(path, name), find(module, name, path)) for name in _names(self.norms)]
        return [_build_cut_dim(producers[0].num_outputs, producers, consumers, norms)]


@dataclass(frozen=True)
class FeedForward(Rule):
    """Rule for the hidden units of a transformer's feed-forward, between two Linear layers.

    ``expand`` names the first layer within the submodule, or several in a gated feed-forward;
    ``contract`` the second one.
    """

    expand: str | Sequence[str]
    contract: str

    @override
    def cut_dims(self, module: nn.Module, path: str) -> list[CutDim]:
        for layer in layers_of([*_names(self.expand), self.contract], module, path):
            require(layer.is_linear, "a feed-forward must be of Linear layers", layer.name)
        return Hidden(self.expand, self.contract).cut_dims(module, path)


@dataclass(frozen=True, kw_only=True)
class Heads(Rule):
    """Rule for attention heads, where attention is written with Linear layers.

    Give either ``qkv``, one layer whose outputs are all queries, then all keys, then all values, or
    the three layers; and ``project``, the output projection: names within the submodule. Within
    each, the entries of a head are neighbors. A forward that needs the head size must read it off a
    tensor: in a subnet the embedding size over the number of heads is wrong. ``attribute`` of the
    submodule is the number of heads, smaller in a subnet.
    """

    project: str
    qkv: str | None = None
    queries: str | None = None
    keys: str | None = None
    values: str | None = None
    attribute: str = "num_heads"

    def __post_init__(self) -> None:
        apart = [name is not None for name in (self.queries, self.keys, self.values)]
        fits = not any(apart) if self.qkv is not None else all(apart)
        require(fits, "heads must have either qkv or queries, keys and values", str(self))

    @override
    def cut_dims(self, module: nn.Module, path: str) -> list[CutDim]:
        heads = getattr(module, self.attribute, None)
        if not isinstance(heads, int) or heads < 1:
            raise ValueError(
                f"{join(path, self.attribute)} must be the number of heads, got {heads!r}; name "
                "the attribute that is: Heads(..., attribute=...)"
            )
        blocks = 1 if self.qkv is None else 3
        apart = [name for name in (self.qkv, self.queries, self.keys, self.values) if name]
        producers = layers_of(apart, module, path)
        (project,) = layers_of(self.project, module, path)
        head_size, rest = divmod(project.num_inputs, heads)
        for layer in [*producers, project]:
            require(layer.is_linear, "attention must be of Linear layers", layer.name)
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
            CutDim(producers[0].name, heads, (*places, *found), (*counts, count), (project.name,))
        ]


def layers_of(names: str | Sequence[str], module: nn.Module, path: str) -> list[Layer]:
    """Return the layers of names within a submodule; a ValueError if one cannot be cut."""
    return [Layer(join(path, name), find(module, name, path)) for name in _names(names)]


def find(module: nn.Module, name: str, path: str) -> nn.Module:
    """Return the submodule of a name; a ValueError if there is none."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        children = ", ".join(key for key, _ in module.named_children()) or "nothing"
        raise ValueError(
            f"a rule must name submodules of {path or 'the module'}, got {name!r}; children: "
            f"{children}"
        ) from None


def _build_cut_dim(
    units: int,
    producers: Sequence[Layer],
    consumers: Sequence[Layer],
    norms: Sequence[tuple[str, nn.Module]],
) -> CutDim:
    places: list[Place] = []
    counts: list[Count] = []
    for layer in producers:
        rule = "producers of the same units must have equally many"
        got = f"{producers[0].name} with {units} and {layer.name} with {layer.num_outputs}"
        require(layer.num_outputs == units, rule, got)
        found, count = layer.outputs()
        places += found
        counts.append(count)
    for name, norm in norms:
        found, several = norm_places(name, norm, units)
        places += found
        counts += several
    for layer in consumers:
        rule = f"a consumer must have a multiple of the {units} units of {producers[0].name} as"
        got = f"{layer.name} with {layer.num_inputs}"
        require(layer.num_inputs % units == 0, f"{rule} inputs", got)
        found, count = layer.inputs(layer.num_inputs // units)
        places += found
        counts.append(count)
    names = tuple(layer.name for layer in consumers)
    return CutDim(producers[0].name, units, tuple(places), tuple(counts), names)


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
