"""A module around another one, whose names, attributes and keys it shows."""

from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..training import keys_of, uncompiled, with_own_storage
from ..training.shards import is_sharded, like, local_of

_MODULE = "module"  # the attribute


class ModuleWrapper(nn.Module):
    """Shows a module's parameters, buffers, submodules and attributes under their own names.

    So torch's and other libraries' functions of modules work on it: ``get_model_state_dict``,
    ``get_parameter``, safetensors' ``save_model``, or ``generate`` of a language model. A method of
    the module that is called here runs the module itself, without the trainer.

    Attributes:
        module: the wrapped module, without what ``torch.compile`` has wrapped around it.
    """

    def _wrap(self, module: nn.Module) -> None:
        """Set the module; ``_called`` is what a forward calls, compiled or not."""
        self.module = uncompiled(module)
        self.module.register_state_dict_post_hook(_with_own_storages)
        vars(self)["_called"] = module  # not a submodule, whose names would begin with _orig_mod
        owners: list[dict[str, Any]] = []
        for each in self.module.modules():
            owners += [each._parameters, each._modules]
        places = [(owner, key, value) for owner in owners for key, value in owner.items()]
        self._owners, self._keys, self._values = zip(*places, strict=True)
        self._wrapped_with = {id(parameter) for parameter in self.module.parameters()}

    def _check_module(self) -> None:
        """Raise a RuntimeError if the module has parameters that the optimizer does not have."""
        if all(map(is_, map(dict.get, self._owners, self._keys), self._values)):
            return
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        new = [name for name, p in named if id(p) not in self._wrapped_with]
        if new:
            raise RuntimeError(
                "the module must keep the parameters it was wrapped with, got new ones, which are "
                f"neither stepped nor averaged: {', '.join(new[:3])}{', ...' if new[3:] else ''} "
                "(from replacing or sharding a layer, or load_state_dict(assign=True)); close() "
                "and wrap again"
            )

    @override
    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # raises the property's own AttributeError
        modules = vars(self).get("_modules", {})
        if name == _MODULE or _MODULE not in modules:
            return super().__getattr__(name)
        return getattr(modules[_MODULE], name)

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's own named parameters, without a prefix; none without ``recurse``."""
        if recurse:
            yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    @override
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the module's own named buffers, without a prefix; none without ``recurse``."""
        if recurse:
            yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    @override
    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule by its name in the module, or by that of ``named_modules``."""
        try:
            return self.module.get_submodule(target)
        except AttributeError:
            return super().get_submodule(target)

    @override
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the module, compiled or not; ``assign=True`` is an error."""
        if assign:
            raise ValueError("assign must be False: parameters are views of flat buffers, got True")
        return self.module.load_state_dict(keys_of(self.module, state_dict), strict)

    @override
    def share_memory(self) -> Any:
        raise _conversion_error()

    @override
    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Accept what changes nothing; torch would copy to ``cpu:0``, as hosts name the CPU."""
        args = tuple(_without_index(arg) for arg in args)
        return super().to(*args, **{key: _without_index(each) for key, each in kwargs.items()})

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Accept what changes nothing, such as ``.to`` the module's own device; refuse all else."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        tensors += [p.grad for p in self.module.parameters() if p.grad is not None]
        with torch.no_grad():
            for sizes, strides, dtype, device in set(map(_describe, tensors)):
                probe = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
                if fn(probe) is not probe:
                    raise _conversion_error()
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse DistributedDataParallel around this, whose constructor asks for it."""
        raise RuntimeError(
            f"{type(self).__name__} must not be wrapped in DistributedDataParallel, which averages "
            "gradients where this averages parameters: take one of them, and let the host that "
            "wraps models (such as accelerator.prepare) have the optimizer and the loader alone"
        )

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell ``torch.distributed.checkpoint.state_dict`` that names have no "module" in them."""
        return {"": _MODULE, **{name: _MODULE for name, _ in self.module.named_children()}}


def _with_own_storages(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Give each tensor of the module's state dict a storage of its own: those of now, not copies.

    So a part of a state is saved without the rest of its flat buffer, and hosts that save the
    module itself by safetensors, which take tensors of one storage for tied ones, keep them all.
    """
    own: dict[tuple[Any, ...], Tensor] = {}  # tied weights stay so
    for key, value in state.items():
        if not key.startswith(prefix) or not (type(value) is Tensor or is_sharded(value)):
            continue  # extra state, of any type
        tensor = local_of(value)
        if 0 < tensor.nbytes < tensor.untyped_storage().nbytes():
            place = (tensor.data_ptr(), tensor.dtype, value.shape, tensor.stride())
            if place not in own:
                own[place] = like(value, with_own_storage(tensor))
            state[key] = own[place]


def _without_index(value: Any) -> Any:
    is_cpu = isinstance(value, torch.device) and value.type == "cpu"
    return torch.device("cpu") if is_cpu else value


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    """Return sizes of at most 2, strides in the same order, dtype and device."""
    sizes, strides, stride = [min(2, size) for size in tensor.shape], [0] * tensor.dim(), 1
    for dim in sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim)):
        strides[dim] = stride
        stride *= max(1, sizes[dim])
    return tuple(sizes), tuple(strides), tensor.dtype, tensor.device


def _conversion_error() -> RuntimeError:
    return RuntimeError(
        "the module must be moved or converted before it is wrapped: its parameters are views of "
        "flat buffers; got .to(), .cuda(), .half() or similar afterwards"
    )
