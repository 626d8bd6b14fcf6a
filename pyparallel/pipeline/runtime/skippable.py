"""Skip connections: a tensor of one layer that a later layer also takes."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from ...comm import wrong_type


class Skippable(nn.Module):
    """A layer whose output a later layer of the pipeline also takes, or that takes such outputs.

    The terms are those of torchgpipe (Kim et al., arXiv 2004.09910). Between the two layers the
    tensor travels with the activations, and its gradient with their gradients, through the ranks of
    all stages between them: so every schedule treats it as it treats the activations. A U-Net in
    three layers: ``[Skippable(down, stash="high"), middle, Skippable(up, pop="high")]``, where
    ``up(value, high)`` gets both.

    Args:
        module: the layer; called with the output of the previous one, and then what it pops.
        stash: the name under which its output, a tensor, is kept for later layers; also its output
            to the next layer. None: it is not kept.
        pop: names of earlier layers' outputs that it takes, a string or several.

    Raises:
        TypeError: a name is not a string.
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
        return self.module(*args, **kwargs)

    @override
    def extra_repr(self) -> str:
        return f"stash={self.stash!r}, pop={self.pop!r}"


def check_stashed(name: str, value: Any) -> Tensor:
    """Return what a ``Skippable`` layer stashes, if it is one tensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"a layer that stashes its output must return one tensor, got {type(value).__name__} "
            f"for {name!r}; stash in a layer after it"
        )
    return value
