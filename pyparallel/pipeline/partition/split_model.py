"""The layers of models that others wrote, by a description of their parts."""

from collections.abc import Iterable

from torch import nn

from ...training.arguments import check_type
from .attention_layers import attention_layers
from .families import FAMILIES, find_parts
from .model_parts import ModelParts, find_blocks, find_chain

_WAY_OUT = """say where its parts are, as here of a Llama, or give PipelineTrainer a list of layers:
split_model(model, ModelParts(
    embedding="model.embed_tokens", blocks="model.layers", head=["model.norm", "lm_head"],
    attention="causal", rotary="model.rotary_emb"))"""


class SplitModel(list[nn.Module]):
    """The layers of a model, each called with the output of the previous one."""

    def __init__(self, layers: Iterable[nn.Module], model: nn.Module) -> None:
        super().__init__(layers)
        self.model = model


def split_model(model: nn.Module, parts: ModelParts | None = None) -> SplitModel:
    """Return the layers of a model, as ``PipelineTrainer`` takes them.

    They are the embedding, each block, and the head. Layers hold the model's own modules, and so
    does the model after training. A tied embedding is in the first and the last layer.

    Without ``parts`` the model is one that "Train a Hugging Face model in stages" lists; a subclass
    must have the same ``forward``, another class is a TypeError.

    * Of transformers the result is the logits of ``model(..., use_cache=False)``. The first layer
      is called with those arguments that the model has of ``input_ids``, ``inputs_embeds``,
      ``attention_mask`` of shape (batch, sequence), ``position_ids`` and ``token_type_ids``; of a
      ViT with ``pixel_values``. The target is an argument of ``loss_fn``, not ``labels``.
    * Call ``set_grad_checkpointing`` of timm's ResNet before: its blocks then recompute their
      activations.

    A part that the model does not have, or a configuration that computes what the layers in a row
    do not, is a ValueError.
    """
    if parts is None:
        parts = find_parts(model)
    if parts is None:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        known = ", ".join(sorted({each.rpartition(".")[2] for each in FAMILIES}))
        raise TypeError(
            f"model must be one of {known} of transformers, timm and torchvision, with the forward "
            f"of that class, got {name}; {_WAY_OUT}"
        )
    check_type("parts", parts, ModelParts, "a ModelParts")
    if parts.attention is not None:
        return SplitModel(attention_layers(model, parts), model)
    embedding = find_chain(model, "embedding", parts.embedding)
    head = find_chain(model, "head", parts.head)
    return SplitModel([embedding, *find_blocks(model, parts.blocks), head], model)
