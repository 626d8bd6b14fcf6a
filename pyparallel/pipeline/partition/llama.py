"""The layers of Llama, as Hugging Face's transformers has it."""

from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from ..messages import Value
from . import causal_lm


def llama_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a ``LlamaForCausalLM``; raises as ``split_model``."""
    config: Any = model.config
    inner: Any = model.model
    causal_lm.check_config(model, inner, "LlamaModel")
    blocks = inner.layers[: config.num_hidden_layers]
    return [
        _Inputs(inner.embed_tokens),
        *(_Block(each, config, inner.rotary_emb) for each in blocks),
        causal_lm.CausalHead(inner.norm, model.lm_head),  # type: ignore[arg-type]
    ]


class _Inputs(causal_lm.CausalInputs):
    def __init__(self, embed_tokens: Any) -> None:
        super().__init__(embed_tokens.num_embeddings, embed_tokens.embedding_dim)
        self.embed_tokens = embed_tokens

    @override
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Value:
        self._check_others(others)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return causal_lm.pack_inputs(hidden, attention_mask, position_ids)


class _Block(causal_lm.CausalBlock):
    @override
    def _call_block(self, hidden: Tensor, context: causal_lm.AttentionContext) -> Tensor:
        output: Tensor = self.block(
            hidden,
            attention_mask=context.mask,
            position_embeddings=context.rotary,
            position_ids=context.position_ids,
            use_cache=False,
        )
        return output
