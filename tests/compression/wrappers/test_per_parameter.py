"""PerParameter: patterns, groups, and state that follows the names."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.theory.contraction import contraction
from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Cast,
    Collectives,
    ErrorFeedback,
    Int8,
    PermK,
    PerParameter,
    Piece,
    RandomK,
    StateStore,
    Switch,
    Threshold,
    TopK,
    compress_ddp,
)
from tests.compression.means import CPU, gradient, send
from tests.workers import on_ranks

MIXED = PerParameter({"*.bias": Cast(), "head.*": Int8(), "*": ErrorFeedback(TopK(0.1))})
LAYOUT = BufferLayout(
    (
        Piece("a.weight", (10, 4)),
        Piece("a.bias", (10,)),
        Piece("b.weight", (5, 10)),
        Piece("b.bias", (5,)),
        Piece("head.weight", (3, 5)),
        Piece("head.bias", (3,)),
    )
)


def test_every_group_is_compressed_as_a_buffer_of_its_own():
    x = gradient(0, 0, LAYOUT.numel)
    sent = LAYOUT.split(send(MIXED, x, MIXED.init(LAYOUT, CPU)))
    parts = LAYOUT.split(x)
    for place in (1, 3, 5):
        assert torch.equal(sent[place], parts[place].bfloat16().float())
    weights = torch.cat([parts[0].flatten(), parts[2].flatten()])
    state = ErrorFeedback(TopK(0.1)).init(BufferLayout.flat(90), CPU)
    expected = send(ErrorFeedback(TopK(0.1)), weights, state)
    assert torch.equal(torch.cat([sent[0].flatten(), sent[2].flatten()]), expected)
    expected = send(Int8(), parts[4].flatten(), Int8().init(BufferLayout.flat(15), CPU))
    assert torch.equal(sent[4].flatten(), expected)


def test_the_first_matching_pattern_applies():
    by_order = PerParameter({"a.*": Cast(), "*": Threshold(100.0)})
    sent = LAYOUT.split(send(by_order, torch.ones(LAYOUT.numel), by_order.init(LAYOUT, CPU)))
    assert [bool(part.any()) for part in sent] == [True, True] + 4 * [False]


def test_a_buffer_of_one_group_is_not_copied():
    seen = []

    class Spying(Cast):
        def compress(self, x, state, residual=None):
            seen.append((x.data_ptr(), residual.data_ptr()))
            return super().compress(x, state, residual)

    x, residual = torch.ones(LAYOUT.numel), torch.zeros(LAYOUT.numel)
    everything = PerParameter({"*": Spying()})
    everything.compress(x, everything.init(LAYOUT, CPU), residual)
    neighbors = PerParameter({"b.*": Spying(), "*": Int8()})
    neighbors.compress(x, neighbors.init(LAYOUT, CPU), residual)
    places = [(x.data_ptr(), residual.data_ptr())]
    places.append(tuple(start + 50 * 4 for start in places[0]))
    assert seen == places


def test_an_unmatched_parameter_is_named_with_a_fix():
    partial = PerParameter({"*.bias": Cast(), "a.*": Int8()})
    sentence = r"got none for 'b\.weight' in '\*\.bias', 'a\.\*'; add \"\*\" as the last"
    with pytest.raises(ValueError, match=sentence):
        partial.init(LAYOUT, CPU)


def test_only_compressors_are_accepted(subtests):
    for compressors in [{}, {"*": None}, {"*": 0.1}]:
        raises = pytest.raises(ValueError, match="compressors must")
        with subtests.test(str(compressors)), raises:
            PerParameter(compressors)


def test_properties_are_those_of_its_compressors():
    assert PerParameter({"a*": RandomK(0.1), "*": Int8(seed=0)}).unbiased
    assert not PerParameter({"a*": RandomK(0.1), "*": Int8()}).unbiased
    assert not PerParameter({"a*": Cast(), "*": Threshold(1.0)}).fixed_length
    assert MIXED.fixed_length
    assert MIXED.feeds_back
    assert not PerParameter({"*": Cast()}).feeds_back
    with pytest.raises(ValueError, match="must not have error feedback already"):
        ErrorFeedback(MIXED)
    two = PerParameter({"*.bias": Cast(), "*": TopK(0.1)})
    assert contraction(two, LAYOUT) == contraction(TopK(0.1), BufferLayout.flat(105))
    assert contraction(two, BufferLayout((Piece("a.bias", (10,)),))) == contraction(Cast(), LAYOUT)
    some = PerParameter({"*.bias": Threshold(1.0), "*": Cast()})
    assert contraction(some, LAYOUT) is None
    assert two.error_at(AttachPoint.DDP) is None
    assert two.error_at(AttachPoint.GOSSIP) is None
    for place in (AttachPoint.PIPELINE, AttachPoint.FSDP_GRADIENTS, AttachPoint.FSDP_PARAMETERS):
        assert "depend on parameter names" in two.error_at(place)
    assert "num_ranks" in PerParameter({"*": PermK()}).error_at(AttachPoint.GOSSIP)


def test_state_and_draws_follow_a_parameter_into_another_buffer():
    compressor = PerParameter(
        {"*.bias": ErrorFeedback(RandomK(0.3)), "*": ErrorFeedback(TopK(0.2))}
    )
    store = StateStore(compressor, 0, 1)
    weights = BufferLayout(tuple(piece for piece in LAYOUT.pieces if "weight" in piece.name))
    biases = BufferLayout(tuple(piece for piece in LAYOUT.pieces if "bias" in piece.name))
    for layout in (weights, biases):
        state = store.of(layout, CPU)
        for step in range(3):
            compressor.mean_(gradient(0, step, layout.numel), state, Collectives())
    expected = {name: tensor.clone() for name, tensor in residuals(store).items()}
    state = store.of(LAYOUT, CPU)
    assert residuals(store).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in residuals(store).items())
    assert [inner.inner[0].step for inner in state.inner] == [3, 3]


def residuals(store):
    named = store.state_dict()["parameters"]
    return {
        (name, key): tensor
        for name, tensors in named.items()
        for key, tensor in tensors.items()
        if key.endswith("residual")
    }


@on_ranks(3)
def test_means_over_ranks(rank):
    """Use buckets of some parameters each, rebuilt after the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    schedule = {0: Cast(), 2: ErrorFeedback(TopK(0.1))}
    compressor = PerParameter(
        {"1.*": Cast(), "*.bias": Switch(schedule), "*": ErrorFeedback(TopK(1.0))}
    )
    state = compress_ddp(ddp, compressor)
    torch.manual_seed(rank)
    for step in range(4):
        model.zero_grad()
        x = torch.randn(5, 8)
        with ddp.no_sync():
            ddp(x).square().mean().backward()
        own = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        ddp(x).square().mean().backward()
        for name, parameter in model.named_parameters():
            dist.all_reduce(own[name])
            if step < 2 or not name.endswith("bias") or name.startswith("1."):
                torch.testing.assert_close(parameter.grad, own[name] / 3, rtol=0.02, atol=1e-3)
    assert state.state_dict()["common"]["3.bias"]["1.step"] == 4
    assert state.residual_norm > 0
