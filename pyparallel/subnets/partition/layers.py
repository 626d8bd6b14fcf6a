"""Where the inputs and outputs of torch's layers lie in their parameters."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ...training.arguments import require
from .cut_dim import Count, Place


@dataclass(frozen=True)
class Layer:
    """A Linear layer or convolution with its name in the model; a ValueError if it is not cut."""

    name: str
    module: nn.Module

    def __post_init__(self) -> None:
        module = self.module
        rule = "a module that produces or consumes units must be Linear or a convolution"
        got = f"{self.name} of {type(module).__name__}"
        fix = "name the Linear or convolution inside it"
        if isinstance(module, nn.MultiheadAttention):
            fix = "write attention with Linear layers for queries, keys and values to cut its heads"
        require(isinstance(module, nn.Linear | _ConvNd), rule, got, fix)
        groups = module.groups if isinstance(module, _ConvNd) else 1
        rule, got = "a convolution that is cut must have groups=1", f"{self.name} with {groups=}"
        fix = "write rules that do not cut its channels: Partition(rules={name: Hidden(...)})"
        require(groups == 1, rule, got, fix)
        for name in ("weight", "bias"):
            rule = "a layer that is cut must hold plain parameters"
            fix = "remove the parametrization"
            require(name in module._parameters, rule, f"{self.name} whose {name} is computed", fix)

    @property
    def is_linear(self) -> bool:
        """Whether it is a Linear layer, not a convolution."""
        return isinstance(self.module, nn.Linear)

    @property
    def num_outputs(self) -> int:
        """Number of output features or channels."""
        return int(self.module.weight.shape[self._output_dim])  # type: ignore[index]

    @property
    def num_inputs(self) -> int:
        """Number of input features or channels."""
        return int(self.module.weight.shape[1 - self._output_dim])  # type: ignore[index]

    def outputs(self, unit_size: int = 1, blocks: int = 1) -> tuple[list[Place], Count]:
        """Return where the layer's output units lie, and the attribute that counts them."""
        places = [Place(join(self.name, "weight"), self._output_dim, unit_size, blocks)]
        if self.module.bias is not None:
            places.append(Place(join(self.name, "bias"), 0, unit_size, blocks))
        attribute = "out_features" if self.is_linear else "out_channels"
        return places, Count(self.name, attribute, unit_size * blocks)

    def inputs(self, unit_size: int = 1) -> tuple[list[Place], Count]:
        """Return where the layer's input units lie, and the attribute that counts them."""
        places = [Place(join(self.name, "weight"), 1 - self._output_dim, unit_size)]
        attribute = "in_features" if self.is_linear else "in_channels"
        return places, Count(self.name, attribute, unit_size)

    @property
    def _output_dim(self) -> int:
        return int(isinstance(self.module, _ConvTransposeNd))


def norm_places(name: str, module: nn.Module, units: int) -> tuple[list[Place], list[Count]]:
    """Return where units lie in a norm or another module with parameters per channel."""
    fits = isinstance(module, _BatchNorm | _InstanceNorm | nn.PReLU)
    fits = fits and not isinstance(module, nn.SyncBatchNorm)
    rule = "a norm over units that are cut must be BatchNorm, InstanceNorm or PReLU, which do"
    fix = "use BatchNorm there, or rules that do not cut its units"
    require(fits, f"{rule} not mix units", f"{name} of {type(module).__name__}", fix)
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        return [], []
    tracks = not isinstance(module, _BatchNorm) or module.running_mean is not None
    why = "whose output in eval mode would depend on the batch"
    got = f"{name} with track_running_stats=False, {why}"
    require(tracks, "BatchNorm over units that are cut must track running statistics", got)
    count = "num_parameters" if isinstance(module, nn.PReLU) else "num_features"
    length = int(getattr(module, count))
    rule = f"a norm must have a multiple of the {units} units it follows"
    require(length % units == 0, rule, f"{name} with {length}")
    named = [*module.named_parameters(), *module.named_buffers()]
    places = [Place(join(name, key), 0, length // units) for key, tensor in named if tensor.dim()]
    return places, [Count(name, count, length // units)]


def join(path: str, name: str) -> str:
    """Return the full name of the module ``name`` inside the module ``path``."""
    return f"{path}.{name}" if path and name else path or name
