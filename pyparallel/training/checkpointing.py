"""What saving and loading with torch's own functions needs."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils import dlpack
from torch.utils._pytree import tree_map_only

_COMPILED = "_orig_mod"  # the name that torch.compile gives to the module that it wraps


def plain_name(name: str) -> str:
    """Return the name of a tensor or module without what ``torch.compile`` adds to it."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` has wrapped, or the module itself."""
    return dict(module.named_children()).get(_COMPILED, module)


def plain_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state dict with keys without the compiler's prefix."""
    return _renamed(state, plain_name)


def keys_of(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the module's keys: with the compiler's prefix where it has one."""
    modules = (name for name, _ in module.named_modules(remove_duplicate=False))
    own = {plain_name(key): key for key in [*module.state_dict(), *modules]}
    return _renamed(state, lambda key: own.get(plain_name(key), key))


def clone_tensors_for_torch_save(state: Any) -> Any:
    """Return a state whose tensors own their memory, to save a part of a trained module.

    Parameters are views of flat buffers, and ``torch.save`` writes the whole storage of each view.
    Tied weights stay so; whole models need no copy. A state is tensors in dicts, lists and tuples,
    for example ``model.head.state_dict()``.
    """
    clones: dict[tuple[Any, ...], Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        place = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if place not in clones:
            clones[place] = tensor.detach().clone()
        return clones[place]

    return tree_map_only(Tensor, clone, state)


def with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor whose storage has nothing else, as safetensors asks."""
    # By its capsule: a tensor itself must be on the current device.
    capsule: Any = vars(dlpack)["to_dlpack"](tensor.detach())
    own: Tensor = dlpack.from_dlpack(capsule)
    return own


def is_creating_state() -> bool:
    """Return whether the optimizer step in progress is DCP's, at a rate of 0 to create a state."""
    checkpoints: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if checkpoints is None:
        return False
    code = checkpoints._init_optim_state.__code__
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a state dict with other keys, also of torch's versions of its modules."""
    renamed = OrderedDict((rename(key), value) for key, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        vars(renamed)["_metadata"] = OrderedDict(
            (rename(key), value) for key, value in versions.items()
        )
    return renamed
