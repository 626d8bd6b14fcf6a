"""Widths of a chain of layers, found without rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from .layers import Layer, join
from .rules import Hidden
from .width import CutDim

_PER_CHANNEL = (_BatchNorm, _InstanceNorm, nn.PReLU)
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Tanh),
    *(nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.Threshold),
    *(nn.Identity, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
_SPATIAL = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.LPPool1d, nn.LPPool2d, nn.Upsample, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
)
_HINTS: dict[tuple[type[nn.Module], ...], str] = {
    (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm): (
        ", which takes its statistics over units that a subnet lacks (BatchNorm does not)"
    ),
    (nn.MultiheadAttention,): (
        ", whose heads can be cut where it is written with Linear layers (Heads(...))"
    ),
}


@dataclass(frozen=True)
class Chain:
    """The hidden widths of an ``nn.Sequential``: what lies between each layer and the next.

    Serves Linear layers and convolutions with activations, Dropout, BatchNorm, pooling and Flatten
    between them; Sequentials within it are parts of the chain. What stands before the first layer
    or after the last is not cut, and may be anything.
    """

    def widths(self, module: nn.Module, path: str) -> list[CutDim]:
        """One for each pair of neighboring layers.

        Raises:
            ValueError: the module is no chain, or something between two layers may mix units.
        """
        if not isinstance(module, nn.Sequential):
            raise ValueError(
                f"widths can be inferred for an nn.Sequential only, got {path or 'a module'} of "
                f"{type(module).__name__}; say what is cut: Partition(rules={{name: Hidden(...)}})"
            )
        links = list(_flatten(module, ""))
        layers = [i for i, (_, link) in enumerate(links) if isinstance(link, nn.Linear | _ConvNd)]
        if len(layers) < 2:
            within = ", ".join(f"{join(path, name)} of {type(m).__name__}" for name, m in links)
            raise ValueError(
                "a chain must have two Linear layers or convolutions with units between them, got "
                f"{within}; say what is cut within these: Partition(rules={{name: Hidden(...)}})"
            )
        found = []
        for begin, end in pairwise(layers):
            found += _width_between(links[begin], links[begin + 1 : end], links[end], module, path)
        return found


Link = tuple[str, nn.Module]


def _flatten(module: nn.Module, path: str) -> Iterator[Link]:
    for name, child in module._modules.items():  # a module may stand in two places
        assert child is not None
        here = join(path, name)
        if isinstance(child, nn.Sequential):
            yield from _flatten(child, here)
        else:
            yield here, child


def _width_between(
    producer: Link, between: Sequence[Link], consumer: Link, module: nn.Module, path: str
) -> list[CutDim]:
    first, second = (Layer(join(path, name), layer) for name, layer in (producer, consumer))
    is_flat = first.is_linear
    for name, link in between:
        problem = _problem(link, is_flat)
        if problem is not None:
            raise ValueError(
                f"between the layers {first.name} and {second.name} must be what keeps units apart "
                f"(activations, Dropout, BatchNorm, pooling, Flatten), got {join(path, name)} of "
                f"{type(link).__name__}{problem}; say what is cut elsewhere: "
                "Partition(rules={name: Hidden(...)})"
            )
        is_flat = is_flat or isinstance(link, nn.Flatten)
    fits = second.num_inputs == first.num_outputs or (not first.is_linear and is_flat)
    if is_flat != second.is_linear or not fits:
        raise ValueError(
            f"the layer {second.name} must take the units of {first.name} as its inputs, a "
            f"convolution's through a Flatten if it is Linear, got {first.num_outputs} units and "
            f"{second.num_inputs} inputs of {type(second.module).__name__}"
        )
    norms = [name for name, link in between if isinstance(link, _PER_CHANNEL)]
    return Hidden(producer[0], consumer[0], norms).widths(module, path)


def _problem(link: nn.Module, is_flat: bool) -> str | None:
    if isinstance(link, (*_ELEMENTWISE, *_PER_CHANNEL)):
        return None
    if isinstance(link, _SPATIAL):
        return " behind a Linear layer or a Flatten, where it mixes units" if is_flat else None
    if isinstance(link, nn.Flatten):
        return _problem_of_flatten(link)
    return next((hint for kinds, hint in _HINTS.items() if isinstance(link, kinds)), "")


def _problem_of_flatten(link: nn.Flatten) -> str | None:
    if (link.start_dim, link.end_dim) == (1, -1):
        return None
    return f" with start_dim={link.start_dim} and end_dim={link.end_dim}, which must be 1 and -1"
