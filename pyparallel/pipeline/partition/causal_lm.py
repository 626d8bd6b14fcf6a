"""What the adapters of Hugging Face's causal language models share.

Between layers travels the hidden state of shape (batch, sequence, width), alone or in a tuple with
what was given of the attention mask, as bool, and the position ids, both (batch, sequence). Each
stage computes from them what its blocks need, such as the causal mask.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...training import summarize
from ...training.arguments import require
from ..messages import Value

_CONTEXT = "_pyparallel_attention_context"  # of a hidden state: what the next block needs too
_MASK_ARGUMENTS = {"config", "inputs_embeds", "attention_mask", "position_ids"}
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


class AttentionContext(NamedTuple):
    """What the blocks of a stage need for a microbatch besides the hidden state."""

    mask: Any  # of transformers' making, for the attention that the configuration names; or None
    position_ids: Tensor  # (batch or 1, sequence) int64
    rotary: tuple[Tensor, Tensor] | None  # cosines and sines, with rotary embeddings


class CausalBlock(nn.Module, ABC):
    """One block of the model; ``rotary`` is the module of its rotary embeddings, or None."""

    def __init__(self, block: nn.Module, config: Any, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block
        self.rotary = rotary
        self._config = config

    def forward(self, value: Value) -> Value:
        """Return the output in the place of the hidden state."""
        hidden, mask, position_ids = _unpack(value)
        # Once for each stage and microbatch: it is an attribute of the very tensor that the
        # previous block returned. A compiler finds equal expressions itself.
        shares = not torch.compiler.is_compiling()
        context = getattr(hidden, _CONTEXT, None) if shares else None
        context = context or self._compute_context(hidden, mask, position_ids)
        hidden = self._call_block(hidden, context)
        if shares:
            setattr(hidden, _CONTEXT, context)
        return _pack(hidden, mask, position_ids)

    @abstractmethod
    def _call_block(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """Call the block as the model does in training."""

    def _compute_context(
        self, hidden: Tensor, mask: Tensor | None, position_ids: Tensor | None
    ) -> AttentionContext:
        create = sys.modules["transformers.masking_utils"].create_causal_mask
        is_renamed = "cache" in inspect.signature(create).parameters  # from transformers 5.24 on
        causal = create(
            config=self._config,
            inputs_embeds=hidden,
            attention_mask=mask,
            position_ids=position_ids,  # given: it looks for packed sequences
            **{"cache" if is_renamed else "past_key_values": None},
        )
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = None if self.rotary is None else self.rotary(hidden, position_ids=position_ids)
        return AttentionContext(causal, position_ids, rotary)


class CausalHead(nn.Module):
    """The last norm and the head, which returns logits of shape (batch, sequence, vocabulary)."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head

    def forward(self, value: Value) -> Tensor:
        """Return the logits alone."""
        logits: Tensor = self.lm_head(self.norm(_unpack(value)[0]))
        return logits


class CausalInputs(nn.Module, ABC):
    """The first layer: its ``forward`` has the model's arguments, with up to ``num_positions``."""

    def __init__(self, vocabulary: int, width: int, num_positions: int | None = None) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._width = width
        self._num_positions = num_positions

    @abstractmethod
    def forward(self, *args: Any, **others: Any) -> Value:
        """Return the embedded inputs, and what blocks need of the other arguments."""

    def find_input_error(self, *args: Any, **kwargs: Any) -> str | None:
        """Return why the layer cannot be called so, or None; ids are read on the CPU alone."""
        signature = inspect.signature(self.forward)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            return f"inputs must be the arguments {_names(signature)}, got other ones: {error}"
        others = bound.pop("others", {})
        given = {name: value for name, value in bound.items() if value is not None}
        problem = find_other_argument(others, _names(signature)) or _find_type_error(given)
        return problem or self._find_shape_error(given) or self._find_range_error(given)

    def _check_others(self, others: Mapping[str, object]) -> None:
        problem = others and find_other_argument(others, _names(inspect.signature(self.forward)))
        if problem:
            raise ValueError(problem)

    def _find_shape_error(self, given: Mapping[str, Tensor]) -> str | None:
        sources = [name for name in ("input_ids", "inputs_embeds") if name in given]
        if len(sources) != 1:
            return f"inputs must hold one of input_ids and inputs_embeds, got {sources or 'none'}"
        (source,) = sources
        shape = list(given[source].shape)
        if source == "input_ids" and len(shape) != 2:
            return f"input_ids must be of shape (batch, sequence), got {shape}"
        if source == "inputs_embeds" and (len(shape) != 3 or shape[2] != self._width):
            return f"inputs_embeds must be of shape (batch, sequence, {self._width}), got {shape}"
        for name, value in given.items():
            if name != source and list(value.shape) != shape[:2]:
                fix = "; blocks make the causal mask themselves" if "mask" in name else ""
                return (
                    f"{name} must be of shape (batch, sequence) as {source}, {shape[:2]}, got "
                    f"{list(value.shape)}{fix}"
                )
        length = shape[1]
        if self._num_positions is not None and length > self._num_positions:
            return (
                f"{source} must be of at most {self._num_positions} positions, as the model has "
                f"embeddings of, got sequences of {length}: cut them, or build the model with more"
            )
        return None

    def _find_range_error(self, given: Mapping[str, Tensor]) -> str | None:
        limits = {
            "input_ids": self._vocabulary,
            "token_type_ids": self._vocabulary,
            "position_ids": self._num_positions,
        }
        for name, limit in limits.items():
            ids = given.get(name)
            if limit is None or ids is None or not ids.numel() or ids.device.type != "cpu":
                continue
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= limit:
                return f"{name} must be from 0 to {limit - 1}, got {least} to {most}"
        return None


def find_other_argument(others: Mapping[str, object], names: str) -> str | None:
    """Return why the first layer does not take an argument, or None if all are left out."""
    for name, value in others.items():
        if name in _REFUSED and (value is None or value is False):
            continue
        shown = value if isinstance(value, bool | int) else summarize(value)
        fix = _REFUSED.get(name, f"it takes {names}")
        return f"{name} must not be given to the layers of a pipeline, got {shown}; {fix}"
    return None


def check_config(model: nn.Module, inner: nn.Module, inner_class: str) -> None:
    """Raise a ValueError unless the model, by its ``inner`` part, computes what its layers do."""
    config: Any = model.config
    for name, allowed in {
        "add_cross_attention": False,
        "is_encoder_decoder": False,
        "is_causal": True,
    }.items():
        value = getattr(config, name, allowed)
        rule = f"model.config.{name} must be {allowed} for a model that is split"
        got = f"{value}: its blocks would need more than the hidden state and a causal mask"
        require(value == allowed, rule, got)
    mro: tuple[Any, ...] = type(inner).__mro__
    owner = next((cls for cls in mro if cls.__name__ == inner_class), None)
    rule = f"the model must run the forward of {inner_class}"
    got = f"that of {type(inner).__name__}"
    require(owner is not None and mro[0].forward is owner.forward, rule, got)
    masking = sys.modules.get("transformers.masking_utils")
    create = getattr(masking, "create_causal_mask", None)
    if create is None or not inspect.signature(create).parameters.keys() >= _MASK_ARGUMENTS:
        version = getattr(sys.modules.get("transformers"), "__version__", "an unknown version")
        raise ValueError(f"transformers must be version 5 or newer, got {version}")


def pack_inputs(
    hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Value:
    """Return what the first layer sends: a mask of one byte for each token."""
    mask = None if attention_mask is None else attention_mask.to(torch.bool)
    return _pack(hidden, mask, position_ids)


def _pack(hidden: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Value:
    others = tuple(each for each in (mask, position_ids) if each is not None)
    return (hidden, *others) if others else hidden


def _unpack(value: Value) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if isinstance(value, Tensor):
        return value, None, None
    hidden, *others = value
    mask = next((each for each in others if each.dtype == torch.bool), None)
    return hidden, mask, next((each for each in others if each.dtype != torch.bool), None)


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


def _names(signature: inspect.Signature) -> str:
    *first, last = [name for name in signature.parameters if name != "others"]
    return f"{', '.join(first)} and {last}"
