"""The description by which a model is cut into layers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from torch import nn

from ...training.arguments import check_one_of, require

Part = str | Callable[..., Any]


@dataclass(frozen=True)
class ModelParts:
    """Where the embedding, the blocks and the head of a model are, for ``split_model``.

    A part is the path of a module in the model, such as "model.embed_tokens", a module, or a
    function. Several in the place of one are called one after the other, each with the output of
    the previous one.

    Args:
        embedding: is called with the arguments of the model.
        blocks: the path of a list of blocks; or several, of lists and single blocks.
        head: is called with the output of the last block, such as ["model.norm", "lm_head"].
        attention: None: a block is called with the output of the previous one alone. "causal" or
            "bidirectional": as in transformers, with the attention mask that its ``masking_utils``
            makes by ``model.config``, of which ``layer_types`` and ``sliding_window`` say which
            blocks have a sliding window; "causal" with the position ids, too. ``embedding`` must
            then begin with an ``nn.Embedding``, or a module that takes ``input_ids`` and
            ``inputs_embeds`` by name.
        rotary: the path of the module of rotary position embeddings that blocks are called with.
        pools_last_token: whether the result is the head's output at the last token that is not
            padding, as in transformers' sequence classification by decoders.
    """

    embedding: Part | Sequence[Part]
    blocks: Part | Sequence[Part]
    head: Part | Sequence[Part]
    attention: Literal["causal", "bidirectional"] | None = None
    rotary: str | None = None
    pools_last_token: bool = False

    def __post_init__(self) -> None:
        check_one_of("attention", self.attention, (None, "causal", "bidirectional"))
        rule = "attention must be 'causal' or 'bidirectional' with rotary or pools_last_token"
        require(self.attention or not (self.rotary or self.pools_last_token), rule, "None")


class Chain(nn.Sequential):
    """Modules called one after the other, the first with any arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last module."""
        first, *others = self
        value = first(*args, **kwargs)
        for module in others:
            value = module(value)
        return value


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def find_chain(model: nn.Module, name: str, parts: Part | Sequence[Part]) -> Chain:
    """Return the modules of a part; ``name`` is the part's in ``ModelParts``."""
    return Chain(*(find_module(model, name, part) for part in _listed(parts)))


def find_blocks(model: nn.Module, parts: Part | Sequence[Part]) -> list[nn.Module]:
    """Return the blocks of a model, one after the other."""
    blocks: list[nn.Module] = []
    for part in _listed(parts):
        module = find_module(model, "blocks", part)
        is_list = isinstance(part, str) and isinstance(module, nn.ModuleList | nn.Sequential)
        blocks += module if is_list else [module]  # type: ignore[arg-type]
    return blocks


def find_module(model: nn.Module, name: str, part: Part) -> nn.Module:
    """Return the module of a part; a ValueError that names an attribute which does not exist."""
    if not isinstance(part, str):
        return part if isinstance(part, nn.Module) else _Function(part)
    rule = f"{name} must be the path of a module in the model"
    try:
        module = attrgetter(part)(model)
    except AttributeError as error:
        raise ValueError(f"{rule}, got {part!r}: {error}") from error
    require(isinstance(module, nn.Module), rule, f"{part!r}, a {type(module).__name__}")
    assert isinstance(module, nn.Module)
    return module


def _listed(parts: Part | Sequence[Part]) -> Iterable[Part]:
    return parts if isinstance(parts, Sequence) and not isinstance(parts, str) else [parts]
