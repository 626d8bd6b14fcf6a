"""The layers of models that others wrote, by one adapter for each family."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .gpt2 import gpt2_layers
from .llama import llama_layers
from .resnet import timm_layers, torchvision_layers

_ADAPTERS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": gpt2_layers,
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": llama_layers,
    "timm.models.resnet.ResNet": timm_layers,
    "torchvision.models.resnet.ResNet": torchvision_layers,
}
_KNOWN = "GPT2LMHeadModel and LlamaForCausalLM of transformers, and ResNet of timm and torchvision"
_WAY_OUT = (
    "give PipelineTrainer the layers themselves, a list of modules each called with the output of "
    "the previous one, or a model split by torch.distributed.pipelining: pipeline(), PipelineStage"
)


class SplitModel(list[nn.Module]):
    """The layers of a model, each called with the output of the previous one."""

    def __init__(self, layers: Iterable[nn.Module], model: nn.Module) -> None:
        super().__init__(layers)
        self.model = model


def split_model(model: nn.Module) -> SplitModel:
    """Return the layers of a model, as ``PipelineTrainer`` takes them.

    Layers hold the model's own modules, and so does the model after training: ``generate`` and
    ``save_pretrained`` work on it as before. A tied embedding is in the first and the last layer.

    * GPT2LMHeadModel and LlamaForCausalLM of transformers 5: the embedding, each block, and
      the head, which returns logits of shape (batch, sequence, vocabulary). The first layer is
      called with ``input_ids`` or ``inputs_embeds``, ``attention_mask`` of shape (batch, sequence),
      ``position_ids`` and with GPT-2 ``token_type_ids``, as the model is; the result is that of
      ``model(..., use_cache=False)``. The target is an argument of ``loss_fn``, not ``labels``.
    * ResNet of timm and torchvision: the stem, each block, and the head. With timm's, call
      ``set_grad_checkpointing`` before: its blocks then recompute their activations.

    A subclass must have the same ``forward``; another class is a TypeError. A configuration that
    computes what the layers in a row do not is a ValueError.
    """
    mro: tuple[Any, ...] = type(model).__mro__
    found = _name_of(mro[0])
    for cls in mro:
        adapter = _ADAPTERS.get(_name_of(cls))
        if adapter is not None:
            if mro[0].forward is cls.forward:
                return SplitModel(adapter(model), model)
            found += " with a forward of its own"
    raise TypeError(f"model must be one of {_KNOWN}, got {found}; {_WAY_OUT}")


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
