"""The layers of transformers' models: embeddings, blocks that need attention masks, and heads.

Between layers travels the hidden state of shape (batch, sequence, width), alone or in a tuple. The
tuple has what was given of the attention mask, as bool, and the position ids, as int64, both of
shape (batch, sequence); with a head that pools it also each sample's last token, as int32. A stage
computes from them what its blocks need, such as the causal mask.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...training import summarize
from ...training.arguments import check_one_of, require
from ..messages import Value
from .model_parts import Chain, ModelParts, find_blocks, find_chain, find_module

_CONTEXT = "_pyparallel_attention_context"  # of a hidden state: what the next block needs too
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
_MASKS = {
    "full_attention": "create_causal_mask",
    "sliding_attention": "create_sliding_window_causal_mask",
    "bidirectional": "create_bidirectional_mask",
}
_MASK_ARGUMENTS = {"config", "inputs_embeds", "attention_mask", "position_ids"}
# Of model.config, by ModelParts.attention: what its blocks compute from a hidden state and a mask.
_CONFIG = {
    "causal": {"add_cross_attention": False, "is_encoder_decoder": False, "is_causal": True},
    "bidirectional": {"add_cross_attention": False, "is_decoder": False},
}
# Arguments of the model's forward that a pipeline in training has no use for, and why.
_REFUSED = {
    "labels": "give step() the target, and a loss_fn that shifts it: cross_entropy of "
    "logits[:, :-1] and target[:, 1:]",
    "past_key_values": "it is of generation: call model.generate on the whole model",
    "cache": "it is of generation: call model.generate on the whole model",
    "use_cache": "it is of generation: call model.generate on the whole model",
    "logits_to_keep": "slice the logits in loss_fn",
    "output_attentions": "register forward hooks on the model's modules",
    "output_hidden_states": "register forward hooks on the model's modules",
}


class _HiddenState(NamedTuple):
    """What travels between layers: the hidden state, and what blocks and head need besides."""

    hidden: Tensor
    mask: Tensor | None = None
    position_ids: Tensor | None = None
    last: Tensor | None = None

    @classmethod
    def unpack(cls, value: Value) -> "_HiddenState":
        if isinstance(value, Tensor):
            return cls(value)
        by_dtype = {each.dtype: each for each in value[1:]}
        return cls(value[0], *map(by_dtype.get, (torch.bool, torch.int64, torch.int32)))

    def pack(self) -> Value:
        others = tuple(each for each in self[1:] if each is not None)
        return (self.hidden, *others) if others else self.hidden


def attention_layers(model: nn.Module, parts: ModelParts) -> list[nn.Module]:
    """Return the layers of a model whose blocks are called as those of transformers are."""
    config: Any = getattr(model, "config", None)
    _check_config(config, parts)
    rotary = None if parts.rotary is None else find_module(model, "rotary", parts.rotary)
    blocks = find_blocks(model, parts.blocks)
    types = ["bidirectional"] * len(blocks)
    if parts.attention == "causal":
        types = _types_of_blocks(config, len(blocks))
    embedding = find_chain(model, "embedding", parts.embedding)
    arguments = inspect.signature(model.forward).parameters
    names = [name for name in arguments if name in _INPUTS]
    pad_token = config.pad_token_id if parts.pools_last_token else None
    return [
        _Inputs(embedding, names, pad_token, is_causal=parts.attention == "causal"),
        *(_Block(block, config, kind, rotary) for block, kind in zip(blocks, types, strict=True)),
        _Head(find_chain(model, "head", parts.head)),
    ]


def _types_of_blocks(config: Any, num_blocks: int) -> list[str]:
    """Return which causal attention each block has, as transformers' ``masking_utils`` reads it."""
    alike = "full_attention"
    if getattr(config, "sliding_window", None) is not None:
        alike = "sliding_attention"
    types = getattr(config, "layer_types", None) or [alike] * num_blocks
    for each in types:
        check_one_of("model.config.layer_types", each, list(_MASKS)[:2])
    rule = "model.config must describe each of its blocks"
    require(len(types) == num_blocks, rule, f"{len(types)} layer_types for {num_blocks} blocks")
    return list(types)


class _Block(nn.Module):
    """One block of the model; ``rotary`` is the module of its rotary embeddings, or None."""

    def __init__(self, block: nn.Module, config: Any, kind: str, rotary: nn.Module | None) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary
        self._config = config
        self._kind = kind

    def forward(self, value: Value) -> Value:
        """Return the output in the place of the hidden state."""
        state = _HiddenState.unpack(value)
        # Once for each stage and microbatch: it is an attribute of the very tensor that the
        # previous block returned. A compiler finds equal expressions itself.
        shares = not torch.compiler.is_compiling()
        contexts = getattr(state.hidden, _CONTEXT, {}) if shares else {}
        if self._kind not in contexts:
            contexts[self._kind] = self._compute_context(*state[:3])
        hidden = self.block(state.hidden, **contexts[self._kind])
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        if shares:
            setattr(hidden, _CONTEXT, contexts)
        return state._replace(hidden=hidden).pack()

    def _compute_context(
        self, hidden: Tensor, mask: Tensor | None, position_ids: Tensor | None
    ) -> dict[str, Any]:
        """Return what the model calls the block with, besides the hidden state."""
        create = getattr(sys.modules["transformers.masking_utils"], _MASKS[self._kind])
        given = {"config": self._config, "inputs_embeds": hidden, "attention_mask": mask}
        if self._kind == "bidirectional":
            return {"attention_mask": create(**given)}
        is_renamed = "cache" in inspect.signature(create).parameters  # from transformers 5.24 on
        given["cache" if is_renamed else "past_key_values"] = None
        context = {
            "attention_mask": create(
                **given,
                position_ids=position_ids,  # given: it looks for packed sequences
            )
        }
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        context["position_ids"] = position_ids
        if self.rotary is not None:
            by_type = "layer_type" in inspect.signature(self.rotary.forward).parameters
            others = {"layer_type": self._kind} if by_type else {}
            context["position_embeddings"] = self.rotary(hidden, position_ids, **others)
        return context


class _Head(nn.Module):
    """What follows the blocks; of the last tokens, if they travel, it returns the output alone."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, value: Value) -> Tensor:
        """Return the output alone."""
        state = _HiddenState.unpack(value)
        output: Tensor = self.chain(state.hidden)
        if state.last is None:
            return output
        return output[torch.arange(len(output), device=output.device), state.last]


class _Inputs(nn.Module):
    """The first layer: it takes those arguments of the model that are ``names``, in their order.

    With ``pad_token``, the padding's id, it sends which token of a sample is the last one that is
    no padding.
    """

    def __init__(
        self, chain: Chain, names: Sequence[str], pad_token: int | None, *, is_causal: bool
    ) -> None:
        super().__init__()
        self.chain = chain
        self._names = list(names)
        self._pad_token = pad_token
        self._is_causal = is_causal
        taken = inspect.signature(chain[0].forward).parameters
        by_name = "inputs_embeds" in taken  # else an embedding of ids
        self._by_name = [name for name in _INPUTS if by_name and name in taken]

    def forward(self, *args: Any, **kwargs: Any) -> Value:
        """Return the embedded inputs, and what blocks need of the other arguments."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        problem = self._find_other_argument(given)
        if problem:
            raise ValueError(problem)
        ids, hidden = given.get("input_ids"), given.get("inputs_embeds")
        embedding, *others = self.chain
        if self._by_name:
            hidden = embedding(**{name: given.get(name) for name in self._by_name})
        elif hidden is None:
            hidden = embedding(ids)
        for other in others:
            hidden = other(hidden)
        mask, position_ids = given.get("attention_mask"), given.get("position_ids")
        return _HiddenState(
            hidden,
            None if mask is None else mask.to(torch.bool),
            None if position_ids is None or not self._is_causal else position_ids.long(),
            self._find_last(ids, hidden),
        ).pack()

    def _find_last(self, ids: Tensor | None, hidden: Tensor) -> Tensor | None:
        if self._pad_token is None:
            return None
        if ids is None:  # as transformers does, which knows no padding of embeddings
            size, last = hidden.shape[:1], hidden.shape[1] - 1
            return torch.full(size, last, dtype=torch.int32, device=hidden.device)
        places = torch.arange(ids.shape[1], device=ids.device)
        return (places * (ids != self._pad_token)).argmax(1).int()

    def find_input_error(self, *args: Any, **kwargs: Any) -> str | None:
        """Return why the layer cannot be called so, or None; ids are read on the CPU alone."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [inspect.Parameter(name, kind, default=None) for name in self._names]
        others = inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD)
        try:
            inspect.Signature([*own, others]).bind(*args, **kwargs)
        except TypeError as error:
            names = _joined(self._names)
            return f"inputs must be the arguments {names}, got other ones: {error}"
        given = dict(zip(self._names, args, strict=False)) | kwargs
        tensors = {name: given[name] for name in self._names if given.get(name) is not None}
        problem = self._find_other_argument(given) or _find_type_error(tensors)
        return problem or self._find_shape_error(tensors) or self._find_range_error(tensors)

    def _find_other_argument(self, given: Mapping[str, object]) -> str | None:
        """Return why the layer does not take an argument, or None if all others are left out."""
        for name, value in given.items():
            if name in self._names or (name in _REFUSED and (value is None or value is False)):
                continue
            shown = value if isinstance(value, bool | int) else summarize(value)
            fix = _REFUSED.get(name, f"it takes {_joined(self._names)}")
            return f"{name} must not be given to the layers of a pipeline, got {shown}; {fix}"
        return None

    def _find_shape_error(self, given: Mapping[str, Tensor]) -> str | None:
        sources = [name for name in ("input_ids", "inputs_embeds") if name in given]
        if len(sources) != 1:
            return f"inputs must hold one of input_ids and inputs_embeds, got {sources or 'none'}"
        (source,) = sources
        shape = list(given[source].shape)
        if source == "input_ids" and len(shape) != 2:
            return f"input_ids must be of shape (batch, sequence), got {shape}"
        width = getattr(self._table("word"), "embedding_dim", None)
        if source == "inputs_embeds" and (len(shape) != 3 or width not in (None, shape[2])):
            return f"inputs_embeds must be of shape (batch, sequence, {width}), got {shape}"
        for name, value in given.items():
            if name != source and list(value.shape) != shape[:2]:
                fix = "; blocks make the causal mask themselves" if "mask" in name else ""
                return (
                    f"{name} must be of shape (batch, sequence) as {source}, {shape[:2]}, got "
                    f"{list(value.shape)}{fix}"
                )
        length, table = shape[1], self._table("position")
        if table is not None:
            # RoBERTa's positions begin after that of the padding.
            most = (
                table.num_embeddings - (-1 if table.padding_idx is None else table.padding_idx) - 1
            )
            if length > most:
                return (
                    f"{source} must be of at most {most} positions, as the model has embeddings "
                    f"of, got sequences of {length}: cut them, or build the model with more"
                )
        return None

    def _find_range_error(self, given: Mapping[str, Tensor]) -> str | None:
        tables = {"input_ids": "word", "token_type_ids": "token_type", "position_ids": "position"}
        for name, table in tables.items():
            ids, limit = given.get(name), getattr(self._table(table), "num_embeddings", None)
            if limit is None or ids is None or not ids.numel() or ids.device.type != "cpu":
                continue
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= limit:
                return f"{name} must be from 0 to {limit - 1}, got {least} to {most}"
        return None

    def _table(self, name: str) -> Any:
        """Return the embedding of words, positions or token types, if the first part has it."""
        if self._by_name:
            return getattr(self.chain[0], f"{name}_embeddings", None)
        return self.chain[0] if name == "word" else None


def _check_config(config: Any, parts: ModelParts) -> None:
    """Raise a ValueError unless a model of this configuration computes what its layers do."""
    rule = "attention must be None for a model without the config of transformers"
    require(hasattr(config, "get_text_config"), rule, repr(parts.attention))
    for name, allowed in _CONFIG[str(parts.attention)].items():
        value = getattr(config, name, allowed)
        rule = f"model.config.{name} must be {allowed} for a model that is split"
        mask = "a causal mask" if parts.attention == "causal" else "a mask of padding"
        got = f"{value}: its blocks would need more than the hidden state and {mask}"
        require(value == allowed, rule, got)
    if parts.pools_last_token:
        rule = "model.config.pad_token_id must be that of the padding, which the result leaves out"
        require(config.pad_token_id is not None, rule, "None")
    create = getattr(sys.modules.get("transformers.masking_utils"), "create_causal_mask", None)
    if create is None or not inspect.signature(create).parameters.keys() >= _MASK_ARGUMENTS:
        version = getattr(sys.modules.get("transformers"), "__version__", "an unknown version")
        raise ValueError(f"transformers must be version 5 or newer, got {version}")


def _find_type_error(given: Mapping[str, object]) -> str | None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            fix = "; give arguments as a list or by name" if isinstance(value, tuple) else ""
            return f"{name} must be a tensor, got {summarize(value)}{fix}"
        is_ids = name.endswith("_ids")
        if is_ids and value.dtype not in (torch.int64, torch.int32):
            return f"{name} must be int64 or int32, got {value.dtype}"
        if name == "inputs_embeds" and not value.is_floating_point():
            return f"{name} must be of floating-point numbers, got {value.dtype}"
    return None


def _joined(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"
