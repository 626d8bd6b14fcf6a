"""The parts of the models of transformers, timm and torchvision, by their class."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from ...training.arguments import require
from .model_parts import ModelParts

_DECODER = ModelParts(
    "model.embed_tokens",
    "model.layers",
    ["model.norm", "lm_head"],
    attention="causal",
    rotary="model.rotary_emb",
)
_DECODERS = {
    "Arcee": "arcee", "Exaone4": "exaone4", "Gemma": "gemma", "Gemma2": "gemma2", "Glm": "glm",
    "Glm4": "glm4", "Helium": "helium", "Llama": "llama", "Ministral": "ministral",
    "Mistral": "mistral", "Mixtral": "mixtral", "Olmo": "olmo", "Olmo2": "olmo2", "Phi3": "phi3",
    "Qwen2": "qwen2", "Qwen3": "qwen3", "SeedOss": "seed_oss", "SmolLM3": "smollm3",
}  # fmt: skip
_RESNET_BLOCKS = ["layer1", "layer2", "layer3", "layer4"]


def _pooling(parts: ModelParts, norm: str) -> ModelParts:
    """Return the parts of sequence classification by a decoder."""
    return replace(parts, head=[norm, "score"], pools_last_token=True)


def _softcapped(model: Any) -> ModelParts:
    """Return the parts of Gemma 2 and 3."""
    cap = model.config.final_logit_softcapping

    def softcap(logits: Tensor) -> Tensor:
        capped: Tensor = torch.tanh(logits / cap) * cap
        return capped

    return replace(_DECODER, head=["model.norm", "lm_head", *([] if cap is None else [softcap])])


class _Gpt2Embeddings(nn.Module):
    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = transformer.wte, transformer.wpe
        self.drop = transformer.drop

    @property
    def token_type_embeddings(self) -> Any:
        return self.word_embeddings

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
    ) -> Tensor:
        hidden: Tensor = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        hidden = hidden + self.position_embeddings(position_ids)
        if token_type_ids is not None:
            hidden = hidden + self.word_embeddings(token_type_ids)
        dropped: Tensor = self.drop(hidden)
        return dropped


def _gpt2(model: Any) -> ModelParts:
    embeddings = _Gpt2Embeddings(model.transformer)
    head = ["transformer.ln_f", "lm_head"]
    return ModelParts(embeddings, "transformer.h", head, attention="causal")


def _first_token(hidden: Tensor) -> Tensor:
    return hidden[:, 0]


def _encoder(name: str, *head: Any) -> ModelParts:
    embedding, blocks = f"{name}.embeddings", f"{name}.encoder.layer"
    return ModelParts(embedding, blocks, head, attention="bidirectional")


def _timm(model: Any) -> ModelParts:
    def drop(features: Tensor) -> Tensor:
        # The mode of fc, which also the whole model's train() and eval() set.
        return dropout(features, float(model.drop_rate), model.fc.training)

    blocks: Any = _RESNET_BLOCKS
    if model.grad_checkpointing:
        layers = [block for name in blocks for block in getattr(model, name)]
        blocks = [_Recomputed(block) for block in layers]
    return ModelParts(["conv1", "bn1", "act1", "maxpool"], blocks, ["global_pool", drop, "fc"])


class _Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, features, use_reentrant=False)
        return output


_POOLED = _pooling(_DECODER, "model.norm")
TRANSFORMERS: dict[str, ModelParts | Callable[[Any], ModelParts]] = {
    **{f"{module}.{name}ForCausalLM": _DECODER for name, module in _DECODERS.items()},
    **{f"{module}.{name}ForSequenceClassification": _POOLED for name, module in _DECODERS.items()},
    "gemma2.Gemma2ForCausalLM": _softcapped,
    "gemma3.Gemma3ForCausalLM": _softcapped,
    "gemma3.Gemma3TextForSequenceClassification": _POOLED,
    "gpt2.GPT2LMHeadModel": _gpt2,
    "gpt2.GPT2ForSequenceClassification": lambda model: _pooling(_gpt2(model), "transformer.ln_f"),
    "bert.BertForSequenceClassification": _encoder("bert", "bert.pooler", "dropout", "classifier"),
    "roberta.RobertaForSequenceClassification": _encoder("roberta", "classifier"),
    "xlm_roberta.XLMRobertaForSequenceClassification": _encoder("roberta", "classifier"),
    "distilbert.DistilBertForSequenceClassification": ModelParts(
        "distilbert.embeddings",
        "distilbert.transformer.layer",
        [_first_token, "pre_classifier", torch.relu, "dropout", "classifier"],
        attention="bidirectional",
    ),
    "vit.ViTForImageClassification": ModelParts(
        "vit.embeddings", "vit.layers", ["vit.layernorm", _first_token, "classifier"]
    ),
}
FAMILIES: dict[str, ModelParts | Callable[[Any], ModelParts]] = {
    "timm.models.resnet.ResNet": _timm,
    "torchvision.models.resnet.ResNet": ModelParts(
        ["conv1", "bn1", "relu", "maxpool"], _RESNET_BLOCKS, ["avgpool", nn.Flatten(), "fc"]
    ),
}
for _name, _parts in TRANSFORMERS.items():
    FAMILIES["transformers.models.{0}.modeling_{0}.{1}".format(*_name.split("."))] = _parts


def find_parts(model: nn.Module) -> ModelParts | None:
    """Return the parts of a model by its class, or None if its class is not known.

    A subclass must have the same ``forward``, and so must what is inside of it.
    """
    owner = _owner(model)
    parts = None if owner is None else FAMILIES.get(f"{owner.__module__}.{owner.__qualname__}")
    if parts is None:
        return None
    inner = getattr(model, "base_model", model)  # of transformers
    rule = "the model must run the forward of its library's own class"
    require(_owner(inner) is not None, rule, f"that of {type(inner).__name__}")
    return parts if isinstance(parts, ModelParts) else parts(model)


def _owner(model: nn.Module) -> type[Any] | None:
    """Return a model's class in its library, or None if a subclass has its own forward."""
    mro: tuple[Any, ...] = type(model).__mro__
    libraries = ("transformers.", "timm.", "torchvision.")
    owner = next((each for each in mro if each.__module__.startswith(libraries)), None)
    return owner if owner is not None and mro[0].forward is owner.forward else None
