"""What a cut must know of torch's layers: where inputs and outputs lie in their weights."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from .width import Count, Place


@dataclass(frozen=True)
class Layer:
    """A Linear or a convolution by its name in the model.

    Raises:
        ValueError: the module is no such layer, or one that cannot be cut.
    """

    name: str
    module: nn.Module

    def __post_init__(self) -> None:
        module = self.module
        if not isinstance(module, nn.Linear | _ConvNd):
            raise ValueError(
                f"what produces or consumes units must be Linear or a convolution, got {self.name} "
                f"of {type(module).__name__}; {_advice(module)}"
            )
        if isinstance(module, _ConvNd) and module.groups != 1:
            raise ValueError(
                f"a convolution that is cut must have groups=1, got {self.name} with groups="
                f"{module.groups}; write rules that leave its channels whole: "
                "Partition(rules={name: Hidden(...)})"
            )
        for name in ("weight", "bias"):
            if name not in module._parameters:
                raise ValueError(
                    f"a layer that is cut must hold plain parameters, got {self.name} whose {name} "
                    "is computed; remove the parametrization"
                )

    @property
    def is_linear(self) -> bool:
        """Else a convolution."""
        return isinstance(self.module, nn.Linear)

    @property
    def num_outputs(self) -> int:
        """Output features or channels."""
        return int(self.module.weight.shape[self._output_dim])  # type: ignore[index]

    @property
    def num_inputs(self) -> int:
        """Input features or channels."""
        return int(self.module.weight.shape[1 - self._output_dim])  # type: ignore[index]

    def outputs(self, unit_size: int = 1, blocks: int = 1) -> tuple[list[Place], Count]:
        """Where units lie that the layer produces, and what counts them."""
        places = [Place(join(self.name, "weight"), self._output_dim, unit_size, blocks)]
        if self.module.bias is not None:
            places.append(Place(join(self.name, "bias"), 0, unit_size, blocks))
        attribute = "out_features" if self.is_linear else "out_channels"
        return places, Count(self.name, attribute, unit_size * blocks)

    def inputs(self, unit_size: int = 1) -> tuple[list[Place], Count]:
        """Where units lie that the layer consumes, and what counts them."""
        places = [Place(join(self.name, "weight"), 1 - self._output_dim, unit_size)]
        attribute = "in_features" if self.is_linear else "in_channels"
        return places, Count(self.name, attribute, unit_size)

    @property
    def _output_dim(self) -> int:
        return int(isinstance(self.module, _ConvTransposeNd))


def norm_places(name: str, module: nn.Module, units: int) -> tuple[list[Place], list[Count]]:
    """Where units lie in a norm, or in another layer with parameters for each channel.

    Raises:
        ValueError: it mixes units, or has another number of them.
    """
    if isinstance(module, nn.SyncBatchNorm) or not isinstance(
        module, _BatchNorm | _InstanceNorm | nn.PReLU
    ):
        raise ValueError(
            f"a norm over units that are cut must be BatchNorm, InstanceNorm or PReLU, which keep "
            f"units apart, got {name} of {type(module).__name__}; use BatchNorm there, or rules "
            "that leave its width whole"
        )
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        return [], []
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        raise ValueError(
            f"BatchNorm over units that are cut must track running statistics, got {name} with "
            "track_running_stats=False, whose output at test time would hang on the test batch"
        )
    count = "num_parameters" if isinstance(module, nn.PReLU) else "num_features"
    length = int(getattr(module, count))
    if length % units:
        raise ValueError(
            f"a norm must have a multiple of the {units} units it follows, got {name} with {length}"
        )
    named = [*module.named_parameters(), *module.named_buffers()]
    places = [Place(join(name, key), 0, length // units) for key, tensor in named if tensor.dim()]
    return places, [Count(name, count, length // units)]


def join(path: str, name: str) -> str:
    """The name of what has this name within the module of that path."""
    return f"{path}.{name}" if path and name else path or name


def _advice(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "write attention with Linear layers for queries, keys and values to cut its heads"
    return "name the Linear or convolution inside it"
