"""The layers of GPT-2, as Hugging Face's transformers has it."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..messages import Value
from . import causal_lm


def gpt2_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a ``GPT2LMHeadModel``; raises as ``split_model``."""
    transformer: Any = model.transformer
    causal_lm.check_config(model, transformer, "GPT2Model")
    blocks = (_Block(each, model.config) for each in transformer.h)
    return [_Inputs(transformer), *blocks, causal_lm.CausalHead(transformer.ln_f, model.lm_head)]  # type: ignore[arg-type]


class _Inputs(causal_lm.CausalInputs):
    def __init__(self, transformer: Any) -> None:
        wte, wpe = transformer.wte, transformer.wpe
        super().__init__(wte.num_embeddings, wte.embedding_dim, wpe.num_embeddings)
        self.wte, self.wpe, self.drop = wte, wpe, transformer.drop

    @override
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Value:
        self._check_others(others)
        hidden = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        positions = position_ids
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        hidden = hidden + self.wpe(positions)
        if token_type_ids is not None:
            hidden = hidden + self.wte(token_type_ids)
        return causal_lm.pack_inputs(self.drop(hidden), attention_mask, position_ids)


class _Block(causal_lm.CausalBlock):
    @override
    def _call_block(self, hidden: Tensor, context: causal_lm.AttentionContext) -> Tensor:
        # Positional as in the model, as gradient checkpointing with use_reentrant=True needs.
        output: Tensor = self.block(
            hidden,
            None,
            context.mask,
            None,
            encoder_attention_mask=None,
            use_cache=False,
            position_ids=context.position_ids,
        )
        return output
