"""The heads that come with the package: their layers, what they learn, and what they refuse."""

import functools

import pytest
import torch
from torch import nn

from pyparallel.pipeline.interlocking.heads import (
    ConvHead,
    LinearHead,
    PooledHead,
    TiedHead,
)


def test_a_linear_head_without_a_norm_is_a_linear_layer():
    torch.manual_seed(1)
    value = torch.randn(3, 4, 6)
    module = LinearHead(5).build(value)
    weight, bias = module.parameters()
    assert torch.equal(module(value), nn.functional.linear(value, weight, bias))


def test_the_norm_of_a_linear_head_comes_first():
    value = 100 * torch.randn(3, 4, 6)
    module = LinearHead(5, nn.RMSNorm).build(value)
    assert [type(each) for each in module] == [nn.RMSNorm, nn.Linear]
    torch.testing.assert_close(module(value), module(value / 10))


def test_reprs():
    assert repr(LinearHead(5)) == "LinearHead(num_outputs=5, norm=None)"
    assert repr(LinearHead(5, nn.LayerNorm)) == "LinearHead(num_outputs=5, norm=LayerNorm)"
    head = TiedHead(nn.Embedding(7, 6, padding_idx=0))  # without its weight
    assert repr(head) == "TiedHead(embedding=Embedding(7, 6, padding_idx=0), norm=LayerNorm)"


POOLED = [
    (None, (3, 6, 4, 2), (2, 3)),
    (None, (3, 6, 4, 2, 2), (2, 3, 4)),
    (1, (3, 6, 4), 2),
    (-1, (3, 4, 6), 1),
    (-1, (3, 4, 2, 6), (1, 2)),
]


def test_a_pooled_head_takes_the_mean_over_all_but_samples_and_features(subtests):
    for dim, shape, pooled in POOLED:
        with subtests.test(dim=dim, shape=shape, pooled=pooled):
            value = torch.randn(shape)
            module = PooledHead(5, dim).build(value)
            weight, bias = module.parameters()
            assert weight.shape == (5, 6)
            torch.testing.assert_close(module(value), value.mean(pooled) @ weight.T + bias)


def test_a_sequence_may_have_another_length_later():
    module = PooledHead(5, dim=-1).build(torch.randn(3, 4, 6))
    assert module(torch.randn(2, 9, 6)).shape == (2, 5)


def test_three_dimensions_need_dim_to_be_pooled():
    with pytest.raises(ValueError, match=r"dim must be given .* got None for shape \[3, 4, 6\]: "):
        PooledHead(5).build(torch.randn(3, 4, 6))


def test_the_default_convolutional_head_is_that_of_the_paper():
    module = ConvHead(10).build(torch.randn(2, 16, 5, 7))
    names = [type(each).__name__ for each in module]
    assert names == [*["Conv2d", "BatchNorm2d", "ReLU"] * 2, "GlobalMean", "Linear"]
    assert [each.weight.shape for each in module if isinstance(each, nn.Conv2d)] == [
        (128, 16, 3, 3),
        (64, 128, 3, 3),
    ]
    assert module[-1].weight.shape == (10, 64)


def test_the_convolutions_keep_the_size_of_the_image():
    value = torch.randn(2, 4, 5, 7)
    module = ConvHead(3, (8, 6)).build(value)
    assert module[:-2](value).shape == (2, 6, 5, 7)


def test_logits_of_a_tied_head_are_products_with_the_embedding():
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
    assert len(list(module.parameters())) == (2 if norm else 0)  # none is the embedding's
    module(value, head.shared).square().sum().backward()
    assert embedding.weight.grad is None
    assert value.grad.abs().sum() > 0
    assert all(each.grad is not None for each in module.parameters())


def test_the_width_must_be_the_embeddings():
    head = TiedHead(nn.Embedding(7, 6))
    with pytest.raises(
        ValueError, match=r"tensor of shape \(batch, ..., 6\), got a tensor of shape \["
    ):
        head.build(torch.randn(3, 4, 5))


def test_an_embedding_whose_weight_is_computed_cannot_be_tied():
    embedding = nn.utils.parametrizations.weight_norm(nn.Embedding(7, 6))
    with pytest.raises(ValueError, match="as its weight, got ParametrizedEmbedding with Tensor"):
        TiedHead(embedding)


NUM_OUTPUTS = "num_outputs must be .* integer, got"
CHANNELS = "channels must be a tuple of positive integers, .* got"
NORM = "norm must be a class of modules .*, got "
BAD_ARGUMENTS = [
    *((head, (each,), f"{NUM_OUTPUTS} {each!r}$") for head in (LinearHead, PooledHead, ConvHead)
      for each in (0, -1, 2.0, True, None)),
    *((PooledHead, (5, each), f"dim must be 1, -1 or None, got {each!r}: ")
      for each in (0, 2, True, "last")),
    *((ConvHead, (5, each), CHANNELS) for each in ((), (8, 0), [8], 8, (8.0,))),
    *((TiedHead, (each,), "embedding must be the model's nn.Embedding, .*, got ")
      for each in (nn.Linear(6, 7), torch.randn(7, 6))),
    *((head, (first, each), NORM)
      for head, first in ((LinearHead, 5), (TiedHead, nn.Embedding(7, 6)))
      for each in (nn.LayerNorm(6), "LayerNorm", int, functools.partial(nn.RMSNorm))),
]  # fmt: skip


def test_bad_arguments_are_refused_in_one_sentence(subtests):
    for head, arguments, sentence in BAD_ARGUMENTS:
        with (
            subtests.test(head=head, arguments=arguments),
            pytest.raises(ValueError, match=f"^{sentence}"),
        ):
            head(*arguments)
