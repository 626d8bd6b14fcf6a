"""Deep Gradient Compression against torch's SGD, TopK, and its own invariants."""

import math
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pyparallel.compression import (
    DGC,
    AttachPoint,
    BufferLayout,
    Collectives,
    CompressorState,
    ErrorFeedback,
    TopK,
    compress_ddp,
    compress_fsdp,
)
from tests.compression.means import send

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")
NUMEL, NUM_STEPS = 300, 12


def draw(steps=NUM_STEPS, numel=NUMEL, seed=0):
    return torch.randn(steps, numel, generator=torch.Generator().manual_seed(seed))


def start(compressor, numel=NUMEL):
    layout = BufferLayout.flat(numel)
    return layout, compressor.init(layout, CPU)


def run_sgd(gradients, **options):
    """Return the updates of torch's SGD with lr 1, by step."""
    parameter = torch.zeros(gradients.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0, **options)
    steps = []
    for gradient in gradients.double():
        before = parameter.detach().clone()
        parameter.grad = gradient
        optimizer.step()
        steps.append(before - parameter.detach())
    return torch.stack(steps).float()


def test_without_momentum_it_is_error_feedback_of_top_k():
    mine, theirs = DGC(0.03, momentum=0.0), ErrorFeedback(TopK(0.03))
    (_, state), (_, other) = start(mine), start(theirs)
    for x in draw():
        torch.testing.assert_close(
            send(mine, x, state), send(theirs, x, other), rtol=0, atol=0, msg="messages differ"
        )
    residual = other.entries["residual"]
    torch.testing.assert_close(state.entries["residual"], residual, rtol=0, atol=0)


def test_at_density_1_it_is_sgd_with_momentum(subtests):
    for nesterov in [False, True]:
        with subtests.test(str(nesterov)):
            compressor = DGC(1.0, nesterov=nesterov, masking=False)
            _, state = start(compressor)
            sent = torch.stack([send(compressor, x, state) for x in draw()])
            torch.testing.assert_close(sent, run_sgd(draw(), momentum=0.9, nesterov=nesterov))
            assert not state.entries["residual"].any()


def test_masking_at_density_1_leaves_no_momentum():
    compressor = DGC(1.0, momentum=0.9)
    _, state = start(compressor)
    sent = torch.stack([send(compressor, x, state) for x in draw()])
    torch.testing.assert_close(sent, draw(), rtol=0, atol=0)


def test_messages_and_residual_add_up_to_the_momentum_updates(subtests):
    for masking, nesterov in product([False, True], [False, True]):
        with subtests.test(f"{masking} {nesterov}"):
            compressor = DGC(0.05, masking=masking, nesterov=nesterov)
            _, state = start(compressor)
            sent, given = torch.zeros(NUMEL), torch.zeros(NUMEL)
            for x in draw():
                u = state.entries["momentum"] * 0.9 + x
                given += x + 0.9 * u if nesterov else u
                sent += send(compressor, x, state)
            torch.testing.assert_close(sent + state.entries["residual"], given)
            assert state.entries["residual"].any()


def test_masking_stops_the_momentum_of_sent_entries():
    masking, bare = DGC(0.1), DGC(0.1, masking=False)
    (_, masked), (_, unmasked) = start(masking), start(bare)
    x = draw(1)[0]
    _, indices = masking.compress(x, masked)
    bare.compress(x, unmasked)
    assert len(indices) == NUMEL // 10
    assert torch.equal(unmasked.entries["momentum"], x)
    assert torch.equal(masked.entries["momentum"].nonzero().flatten().int(), other_than(indices))
    assert torch.equal(masked.entries["residual"], unmasked.entries["residual"])


def other_than(indices):
    return torch.tensor([i for i in range(NUMEL) if i not in set(indices.tolist())]).int()


def test_the_density_falls_in_the_stages_of_the_paper():
    compressor = DGC(0.001, warm_up=8)
    densities = [compressor.density_at(step) for step in range(10)]
    paper = [0.25, 0.0625, 0.015625, 0.004]
    for stage, expected in enumerate(paper):
        assert densities[2 * stage] == densities[2 * stage + 1]
        assert densities[2 * stage] == pytest.approx(expected, rel=0.02)
    assert densities[8:] == [0.001, 0.001]
    assert not compressor.fixed_length
    assert DGC(0.001).fixed_length


def test_messages_follow_the_warm_up():
    compressor = DGC(0.01, warm_up=4)
    _, state = start(compressor, 1000)
    lengths = [len(compressor.compress(x, state)[0]) for x in draw(6, 1000)]
    assert lengths == [398, 158, 63, 25, 10, 10]


def test_options_out_of_range_are_rejected(subtests):
    for options, sentence in [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"warm_up": -1}, "warm_up must be an integer of at least 0, got -1"),
        ({"clip_norm": 0.0}, "clip_norm must be finite and > 0, or None, got 0.0"),
        ({"clip_norm": NAN}, "clip_norm must be finite and > 0, or None, got nan"),
    ]:
        with subtests.test(str(options)), pytest.raises(ValueError, match=sentence):
            DGC(**options)


def test_a_second_residual_is_rejected():
    with pytest.raises(
        ValueError, match="compressor must not have error feedback already, got DGC"
    ):
        ErrorFeedback(DGC(0.1))
    compressor = DGC(0.1)
    _, state = start(compressor)
    with pytest.raises(ValueError, match="residual must be None for a compressor with its own"):
        compressor.compress(draw(1)[0], state, torch.zeros(NUMEL))


def test_only_gradients_are_supported():
    supported = {place for place in AttachPoint if DGC().error_at(place) is None}
    assert supported == {AttachPoint.DDP, AttachPoint.FSDP_GRADIENTS}
    assert "got DGC(density=0.001" in DGC().error_at(AttachPoint.GOSSIP)
    clipping = DGC(clip_norm=1.0)
    assert clipping.error_at(AttachPoint.DDP) is None
    assert "clip_norm must be None" in clipping.error_at(AttachPoint.FSDP_GRADIENTS)


def average(rank):
    """Return the means and states of each case by name, on each of three ranks."""
    collectives = Collectives()
    layout = BufferLayout.of([("a", torch.empty(100)), ("b", torch.empty(200))])
    cases = {
        "dense": DGC(1.0, masking=False),
        "sparse": DGC(0.02),
        "clipped": DGC(1.0, momentum=0.0, clip_norm=2.0),
    }
    found = {}
    for name, compressor in cases.items():
        state: CompressorState = compressor.init(layout, CPU, rank)
        means, given = [], torch.zeros(NUMEL)
        for x in draw(seed=rank):
            given += 0.9 * state.entries["momentum"] + x
            means.append(x.clone())
            compressor.mean_(means[-1], state, collectives)
        found[name] = torch.stack(means), state.entries["residual"], given
    poisoned = draw(seed=rank)[0]
    poisoned[0] = NAN
    cases["clipped"].mean_(poisoned, cases["clipped"].init(layout, CPU, rank), collectives)
    found["poisoned"] = (poisoned,)
    return found


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 30), nn.Linear(30, 1))


def train(rank, model, momentum):
    """Return the parameters after some steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for inputs in torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(rank)):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    wholes = (
        each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()
    )
    return torch.cat([each.detach().flatten() for each in wholes])


def train_in_three_ways(rank):
    """Train with the optimizer's momentum, and with DGC's under DDP and FSDP2."""
    compressor = DGC(1.0, masking=False)
    plain, ddp = (DistributedDataParallel(build(), bucket_cap_mb=0.002) for _ in range(2))
    compress_ddp(ddp, compressor)
    sharded = fully_shard(build(), mesh=init_device_mesh("cpu", (3,)))
    compress_fsdp(sharded, gradients=compressor)
    return [train(rank, plain, 0.9), train(rank, ddp, 0.0), train(rank, sharded, 0.0)]


def average_and_train(rank):
    return average(rank), train_in_three_ways(rank)


@pytest.fixture(scope="module")
def outcomes(ranks):
    return ranks.run(3, average_and_train)


def test_it_takes_the_place_of_the_optimizers_momentum(outcomes):
    for _, (expected, ddp, fsdp) in outcomes:
        torch.testing.assert_close(ddp, expected)
        torch.testing.assert_close(fsdp, expected)
        assert torch.equal(ddp, outcomes[0][1][1])


def test_means_over_three_ranks(outcomes):
    outcomes = [each for each, _ in outcomes]
    gradients = torch.stack([draw(seed=rank) for rank in range(3)])
    for name in outcomes[0]:
        first, *others = (each[name][0].nan_to_num(7) for each in outcomes)
        assert all(torch.equal(first, other) for other in others), name

    expected = run_sgd(gradients.mean(0), momentum=0.9)
    torch.testing.assert_close(outcomes[0]["dense"][0], expected)

    sent = outcomes[0]["sparse"][0].sum(0)
    kept = torch.stack([each["sparse"][1] for each in outcomes]).mean(0)
    given = torch.stack([each["sparse"][2] for each in outcomes]).mean(0)
    torch.testing.assert_close(sent + kept, given)
    assert kept.any()

    limit = 2.0 / math.sqrt(3)
    torch.testing.assert_close(outcomes[0]["clipped"][0], clip(gradients, limit).mean(0))
    (poisoned,) = outcomes[0]["poisoned"]
    assert poisoned[0].isnan()
    torch.testing.assert_close(poisoned[1:100], gradients[:, 0, 1:100].mean(0))
    torch.testing.assert_close(poisoned[100:], clip(gradients, limit)[:, 0, 100:].mean(0))


def clip(gradients, limit):
    parts = [part / part.norm(dim=-1, keepdim=True) for part in gradients.split([100, 200], -1)]
    return torch.cat(parts, -1) * limit
