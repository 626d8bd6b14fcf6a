"""Hidden dimensions of an ``nn.Sequential``, inferred without rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from typing_extensions import override

from ...training.arguments import require
from .cut_dim import CutDim
from .layers import Layer, join
from .rules import Hidden, Rule

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
        ", which normalizes over units that a subnet lacks (BatchNorm does not)"
    ),
    (nn.MultiheadAttention,): (
        ", whose heads can be cut where it is written with Linear layers (Heads(...))"
    ),
}


@dataclass(frozen=True)
class SequentialChain(Rule):
    """Rule that cuts every hidden dimension of an ``nn.Sequential``, between consecutive layers.

    Supports Linear layers and convolutions with activations, Dropout, BatchNorm, pooling and
    Flatten between them; nested Sequentials are part of the chain. Modules before the first layer
    or after the last are not cut and may be of any kind.
    """

    @override
    def cut_dims(self, module: nn.Module, path: str) -> list[CutDim]:
        rule = "hidden dimensions can be inferred for an nn.Sequential only"
        fix = "declare what is cut: Partition(rules={name: Hidden(...)})"
        got = f"{path or 'a module'} of {type(module).__name__}"
        require(isinstance(module, nn.Sequential), rule, got, fix)
        modules = list(_flatten(module, ""))
        layers = [
            i for i, (_, inner) in enumerate(modules) if isinstance(inner, nn.Linear | _ConvNd)
        ]
        if len(layers) < 2:
            within = ", ".join(f"{join(path, name)} of {type(m).__name__}" for name, m in modules)
            raise ValueError(
                "a chain must have two Linear layers or convolutions with units between them, got "
                f"{within}; declare what is cut in these: Partition(rules={{name: Hidden(...)}})"
            )
        found = []
        for begin, end in pairwise(layers):
            found += _cut_dim_between(
                modules[begin], modules[begin + 1 : end], modules[end], module, path
            )
        return found


NamedModule = tuple[str, nn.Module]


def _flatten(module: nn.Module, path: str) -> Iterator[NamedModule]:
    for name, child in module._modules.items():  # the same module may be registered twice
        assert child is not None
        here = join(path, name)
        if isinstance(child, nn.Sequential):
            yield from _flatten(child, here)
        else:
            yield here, child


def _cut_dim_between(
    producer: NamedModule,
    between: Sequence[NamedModule],
    consumer: NamedModule,
    module: nn.Module,
    path: str,
) -> list[CutDim]:
    first, second = (Layer(join(path, name), layer) for name, layer in (producer, consumer))
    is_flat = first.is_linear
    for name, inner in between:
        error_text = _find_error(inner, is_flat)
        if error_text is not None:
            raise ValueError(
                f"modules between the layers {first.name} and {second.name} must not mix units "
                f"(activations, Dropout, BatchNorm, pooling, Flatten), got {join(path, name)} of "
                f"{type(inner).__name__}{error_text}; declare other cuts: "
                "Partition(rules={name: Hidden(...)})"
            )
        is_flat = is_flat or isinstance(inner, nn.Flatten)
    fits = second.num_inputs == first.num_outputs or (not first.is_linear and is_flat)
    way = "(from a convolution to a Linear layer through a Flatten)"
    rule = f"the layer {second.name} must take the units of {first.name} as its inputs {way}"
    inputs = f"{second.num_inputs} inputs of {type(second.module).__name__}"
    got = f"{first.num_outputs} units and {inputs}"
    require(is_flat == second.is_linear and fits, rule, got)
    norms = [name for name, inner in between if isinstance(inner, _PER_CHANNEL)]
    return Hidden(producer[0], consumer[0], norms).cut_dims(module, path)


def _find_error(inner: nn.Module, is_flat: bool) -> str | None:
    if isinstance(inner, (*_ELEMENTWISE, *_PER_CHANNEL)):
        return None
    if isinstance(inner, _SPATIAL):
        return " after a Linear layer or a Flatten, where it mixes units" if is_flat else None
    if isinstance(inner, nn.Flatten):
        begin, end = inner.start_dim, inner.end_dim
        if (begin, end) == (1, -1):
            return None
        return f" with start_dim={begin} and end_dim={end}, which must be 1 and -1"
    return next((hint for kinds, hint in _HINTS.items() if isinstance(inner, kinds)), "")
