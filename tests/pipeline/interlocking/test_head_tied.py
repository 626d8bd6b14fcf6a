"""The tied head reads the embedding's weight and does not train it."""

import pytest
import torch
from torch import nn

from pyparallel.pipeline.interlocking.standard_heads import TiedHead


def test_logits_are_products_with_the_embedding():
    embedding, value = nn.Embedding(7, 6), torch.randn(3, 4, 6)
    logits = TiedHead(embedding, nn.RMSNorm).build(value)(value, embedding.weight)
    expected = nn.functional.rms_norm(value, (6,)) @ embedding.weight.T
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("norm", [nn.LayerNorm, None])
def test_the_embedding_gets_no_gradient(norm):
    embedding = nn.Embedding(7, 6)
    value = torch.randn(3, 6, requires_grad=True)
    head = TiedHead(embedding, norm)
    module = head.build(value)
    assert head.shared is embedding.weight
    assert embedding.weight not in set(module.parameters())
    module(value, head.shared).square().sum().backward()
    assert embedding.weight.grad is None
    assert value.grad.abs().sum() > 0
    assert all(each.grad is not None for each in module.parameters())


def test_without_a_norm_it_has_no_parameters():
    assert not list(TiedHead(nn.Embedding(7, 6), None).build(torch.randn(3, 6)).parameters())


def test_repr_names_the_embedding_without_its_weight():
    head = TiedHead(nn.Embedding(7, 6, padding_idx=0))
    assert repr(head) == "TiedHead(embedding=Embedding(7, 6, padding_idx=0), norm=LayerNorm)"


def test_the_width_must_be_the_embeddings():
    head = TiedHead(nn.Embedding(7, 6))
    with pytest.raises(ValueError, match=r"tensor of shape \(batch, ..., 6\), got one of shape \["):
        head.build(torch.randn(3, 4, 5))


@pytest.mark.parametrize("embedding", [nn.Linear(6, 7), torch.randn(7, 6)])
def test_only_an_embedding_can_be_tied(embedding):
    with pytest.raises(ValueError, match=r"^embedding must be the model's nn.Embedding, .*, got "):
        TiedHead(embedding)


def test_an_embedding_whose_weight_is_computed_cannot_be_tied():
    embedding = nn.utils.parametrizations.weight_norm(nn.Embedding(7, 6))
    with pytest.raises(ValueError, match="as its weight, got ParametrizedEmbedding with Tensor"):
        TiedHead(embedding)
