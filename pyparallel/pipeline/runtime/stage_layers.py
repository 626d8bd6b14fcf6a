"""The module of a stage: its layers, and what travels through it besides their value."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from ...training import plain_name, uncompiled, wrong_type
from ..messages import tensors_of

_NONE: Mapping[str, Any] = MappingProxyType({})


class Skippable(nn.Module):
    """A layer whose output a later layer of the pipeline also takes, or that takes such outputs.

    The terms are those of torchgpipe (Kim et al., arXiv 2004.09910). Between the two layers the
    tensor travels with the activations, and its gradient with theirs. A U-Net in three layers:
    ``[Skippable(down, stash="high"), middle, Skippable(up, pop="high")]``, where ``up(value,
    high)`` gets both.

    Args:
        module: the layer; called with the output of the previous one, and then what it pops.
        stash: the name under which its output, a tensor, is kept for later layers; also its output
            to the next layer. None: it is not kept.
        pop: names of earlier layers' outputs that it takes, a string or several.
    """

    def __init__(
        self, module: nn.Module, *, stash: str | None = None, pop: str | Iterable[str] = ()
    ) -> None:
        super().__init__()
        names = (pop,) if isinstance(pop, str) else tuple(pop)
        for each in (*names, *(() if stash is None else (stash,))):
            if not isinstance(each, str):
                raise wrong_type("stash and pop", "names", each)
        self.module = module
        self.stash = stash
        self.pop = names

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        return self.module(*args, **kwargs)

    @override
    def extra_repr(self) -> str:
        return f"stash={self.stash!r}, pop={self.pop!r}"


class StageLayers(nn.Sequential):
    """A stage's layers in their order; the first one is called with the stage's arguments.

    Tensors that skip layers follow the value in its inputs and outputs, and with a schedule that
    does not flush tied parameters do. ``lent`` are parameters that later stages read, by the name
    under which they travel; ``borrowed``, by name here, has the name of one that an earlier stage
    owns, or None if each rank has a copy. ``names`` are in the whole model, where they differ.
    """

    def __init__(
        self,
        layers: "OrderedDict[str, nn.Module]",
        *,
        skips_in: Iterable[str] = (),
        skips_out: Iterable[str] = (),
        lent: Mapping[str, nn.Parameter] = _NONE,
        borrowed: Mapping[str, str | None] = _NONE,
        names: Mapping[str, str] = _NONE,
    ) -> None:
        super().__init__(layers)
        self.skips_in = tuple(skips_in)
        self.skips_out = tuple(skips_out)
        self.lent = dict(lent)
        self.borrowed = dict(borrowed)
        self.names = dict(names)
        inner = {name: uncompiled(layer) for name, layer in layers.items()}
        self._skippable = {name: e for name, e in inner.items() if isinstance(e, Skippable)}

    def owned_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this stage owns, with their names in the whole model."""
        for name, parameter in self.named_parameters():
            if name not in self.borrowed:
                yield self.names.get(name, name), parameter

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        skips: dict[str, Tensor] = {}
        if self.skips_in:
            parts, count = tensors_of(args[0]), len(self.skips_in)
            skips.update(zip(self.skips_in, parts[-count:], strict=True))
            own = parts[:-count]
            args = (own[0] if len(own) == 1 else own,)
        for name, parameter in self.lent.items():
            # The memory of the parameter may hold another version before this one has been sent.
            skips[name] = parameter.clone()
        for name, layer in self._modules.items():
            assert layer is not None
            skippable = self._skippable.get(name)
            if skippable is not None:
                args = (*args, *(skips[each] for each in skippable.pop))
            if self.borrowed:
                value = self._run(name, layer, args, kwargs, skips)
            else:
                value = layer(*args, **kwargs)
            if skippable is not None and skippable.stash is not None:
                skips[skippable.stash] = check_stashed(skippable.stash, value)
            args, kwargs = (value,), {}
        sent = [skips[name] for name in self.skips_out]
        return _join(value, sent) if sent else value

    def _run(
        self,
        name: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        skips: Mapping[str, Tensor],
    ) -> Any:
        """Run a layer, with tied parameters replaced by those that have arrived."""
        prefix = f"{name}."
        replaced = {
            parameter.removeprefix(prefix): skips[skip]
            for parameter, skip in self.borrowed.items()
            if skip is not None and parameter.startswith(prefix)
        }
        return (
            functional_call(layer, replaced, args, kwargs) if replaced else layer(*args, **kwargs)
        )


def owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a stage's module owns, by their names in the whole model."""
    named = module.named_parameters()
    if isinstance(module, StageLayers):
        named = module.owned_parameters()
    return {plain_name(name): each for name, each in named}


def _join(value: Any, skips: Sequence[Tensor]) -> Any:
    """Return a stage's output followed by tensors; a wrong output as it is, to be refused."""
    if not isinstance(value, Tensor | tuple):
        return value
    if isinstance(value, tuple) and len(value) == 1:
        raise TypeError(
            "a layer's output before a skip connection or a tied weight must be a tensor or a "
            "tuple of two tensors or more, got a tuple of one; return the tensor itself"
        )
    return (*tensors_of(value), *skips)


def check_stashed(name: str, value: Any) -> Tensor:
    """Return what a ``Skippable`` layer stashes, or raise a TypeError if it is not one tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"a layer that stashes its output must return one tensor, got {type(value).__name__} "
            f"for {name!r}; stash in a layer after it"
        )
    return value
