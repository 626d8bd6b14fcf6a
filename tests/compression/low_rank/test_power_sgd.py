import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.theory.contraction import contraction
from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Collectives,
    ErrorFeedback,
    Piece,
    PowerSGD,
    StateStore,
    compress_ddp,
)
from pyparallel.compression.low_rank.matrices import Matrices
from pyparallel.training import seal
from tests.workers import call_each

CPU = torch.device("cpu")
SHAPES = [(40, 30), (30,), (30, 50), (40, 30), (3, 4), (40, 30), (16, 4, 3, 3), (7,)]
MODEL = BufferLayout(tuple(Piece(f"p{index}", shape) for index, shape in enumerate(SHAPES)))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Together(PowerSGD):
    """PowerSGD batched as on a GPU."""

    def _matrices(self, layout, device):
        return Matrices.of(layout, self.rank, self.min_ratio, singly=False)


def draw(seed, dtype=torch.float32, layout=MODEL):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.numel, generator=generator).to(dtype)


def send(compressor, x, state, residual=None):
    message = compressor.compress(x, state, residual)
    return compressor.decompress(message, state.layout, torch.empty_like(x))


def error(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def piece(flat, name, layout=MODEL):
    return layout.split(flat)[layout.names.index(name)]


def bases(state):
    return {name: tensors["q"].clone() for name, tensors in state.pieces.items()}


def span(q):
    basis = torch.linalg.qr(q.double()).Q
    return basis @ basis.mT


# One process.


def test_a_low_rank_matrix_is_exact():
    x = draw(0)
    for part in MODEL.split(x):
        if part.dim() > 1:
            matrix = part.view(part.shape[0], -1)
            matrix.copy_(matrix[:, :2] @ matrix[:2])
    assert error(send(PowerSGD(2), x, PowerSGD(2).init(MODEL, CPU)), x) < 1e-5


def test_warm_start_finds_the_best_low_rank():
    compressor = PowerSGD(3)
    layout = BufferLayout((Piece("w", (40, 30)),))
    state, x = compressor.init(layout, CPU), draw(1, layout=layout)
    errors = [error(send(compressor, x, state), x) for _ in range(60)]
    left = torch.linalg.svdvals(x.view(40, 30))[3:].norm() / x.norm()
    assert errors[0] > 1.02 * left
    assert errors[-1] == pytest.approx(float(left), rel=1e-3)


def test_factors_are_float32(subtests):
    for dtype in TOLERANCE:
        with subtests.test(str(dtype)):
            compressor, x = PowerSGD(2), draw(4, dtype)
            narrow, wide = (
                compressor.compress(each, compressor.init(MODEL, CPU)) for each in (x, x.float())
            )
            assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))
            assert {each.dtype for each in narrow} == {torch.float32}


def test_gradients_of_any_magnitude(subtests):
    for scale in [1e-30, 1e30]:
        with subtests.test(str(scale)):
            compressor, x = PowerSGD(2), draw(5)
            state, scaled_state = compressor.init(MODEL, CPU), compressor.init(MODEL, CPU)
            for _ in range(3):
                plain, scaled = (
                    send(compressor, x, state),
                    send(compressor, x * scale, scaled_state),
                )
            assert error(scaled / scale, plain) < 1e-4


def test_batches_equal_single_matrices(subtests):
    for dtype, tolerance in TOLERANCE.items():
        with subtests.test(str(dtype)):
            apart, together = PowerSGD(2), Together(2)
            assert len(together._matrices(MODEL, CPU).batches) < len(
                apart._matrices(MODEL, CPU).batches
            )
            states = [each.init(MODEL, CPU) for each in (apart, together)]
            residuals = [torch.zeros(MODEL.numel) for _ in states]
            for step in range(3):
                x = draw(step, dtype)
                one, other = (
                    send(*each)
                    for each in zip((apart, together), (x, x), states, residuals, strict=True)
                )
                assert error(other, one) < tolerance
            assert error(residuals[1], residuals[0]) < 1e-4


def test_draws_are_by_seed_and_name():
    first, again, other = (PowerSGD(2, seed).init(MODEL, CPU) for seed in (0, 0, 1))
    far = PowerSGD(2).init(MODEL, CPU, rank=3)
    assert all(
        torch.equal(first.pieces[name]["q"], again.pieces[name]["q"]) for name in bases(first)
    )
    assert all(torch.equal(first.pieces[name]["q"], far.pieces[name]["q"]) for name in bases(first))
    assert not torch.equal(first.pieces["p0"]["q"], other.pieces["p0"]["q"])
    assert not torch.equal(first.pieces["p0"]["q"], first.pieces["p3"]["q"])
    x = draw(6)
    messages = [PowerSGD(2).compress(x, state) for state in (first, again)]
    assert all(torch.equal(a, b) for a, b in zip(*messages, strict=True))


def test_zeros_stay_zeros_and_keep_q():
    compressor = ErrorFeedback(PowerSGD(2))
    state = compressor.init(MODEL, CPU)
    before = bases(state.inner[0])
    assert send(compressor, torch.zeros(MODEL.numel), state).eq(0).all()
    for name, q in bases(state.inner[0]).items():
        torch.testing.assert_close(span(q), span(before[name]), rtol=0, atol=1e-6)
    fresh = compressor.init(MODEL, CPU)
    assert error(send(compressor, draw(7), state), send(compressor, draw(7), fresh)) < 1e-5


def test_an_out_of_another_length_is_rejected():
    compressor = PowerSGD(2)
    message = compressor.compress(draw(13), compressor.init(MODEL, CPU))
    storage = torch.zeros(2 * MODEL.numel)  # a shorter view of it could be written past its end
    with pytest.raises(ValueError, match=f"a contiguous buffer of {MODEL.numel} entries"):
        compressor.decompress(message, MODEL, storage[: -MODEL.numel][1:])
    assert storage.eq(0).all()


def test_supported_places():
    supported = {place for place in AttachPoint if PowerSGD().error_at(place) is None}
    assert supported == {AttachPoint.DDP, AttachPoint.GOSSIP, AttachPoint.OUTER_STEPS}
    assert "shards" in PowerSGD().error_at(AttachPoint.FSDP_GRADIENTS)
    assert "error feedback" in PowerSGD().error_at(AttachPoint.PIPELINE)


def test_declared_properties():
    assert not PowerSGD().unbiased
    assert PowerSGD().fixed_length
    assert contraction(PowerSGD(), MODEL) is None
    assert contraction(PowerSGD(), BufferLayout.flat(9)) == 1
    assert eval(repr(PowerSGD(3, 5, min_ratio=1.5))) == PowerSGD(3, 5, min_ratio=1.5)


def test_bad_arguments(subtests):
    for arguments, match in [
        ({"rank": 0}, "rank must be from 1 to 64, got 0"),
        ({"rank": 65}, "rank must be from 1 to 64, got 65"),
        ({"min_ratio": -1}, "min_ratio must be >= 0, got -1"),
        ({"min_ratio": math.nan}, "min_ratio must be >= 0, got nan"),
    ]:
        with subtests.test(str(arguments)), pytest.raises(ValueError, match=match):
            PowerSGD(**arguments)


def test_warm_start_survives_other_buffers():
    """In the second half parameters lie in two buffers, in another order."""
    compressor = ErrorFeedback(PowerSGD(2))
    whole, moved_store, cold = (StateStore(compressor, 0, 1) for _ in range(3))
    parts = [BufferLayout(MODEL.pieces[5:]), BufferLayout(MODEL.pieces[4::-1])]
    for step in range(4):
        x = draw(step)
        by_name = dict(zip(MODEL.names, MODEL.split(x), strict=True))
        wanted = send(compressor, x, whole.of(MODEL, CPU))
        if step < 2:
            send(compressor, x, moved_store.of(MODEL, CPU))
            continue
        for layout in parts:
            flat = torch.cat([by_name[name].flatten() for name in layout.names])
            moved = torch.cat([piece(wanted, name).flatten() for name in layout.names])
            assert error(send(compressor, flat, moved_store.of(layout, CPU)), moved) < 1e-5
            assert error(send(compressor, flat, cold.of(layout, CPU)), moved) > 0.1


# Several processes: every case is a function, whose name is in the failure.


def average(tensor, group=None):
    total = tensor.double()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def assert_same_on_all_ranks(tensor, collectives):
    rows = collectives.all_gather(tensor.contiguous().view(-1).view(torch.uint8))
    assert rows.eq(rows[0]).all()


def means_and_residuals_add_up(rank):
    for compressor, dtype in zip((PowerSGD(2), Together(2), PowerSGD(2)), TOLERANCE, strict=True):
        feedback, collectives = ErrorFeedback(compressor), Collectives()
        state = feedback.init(MODEL, CPU, rank)
        expected = torch.zeros(MODEL.numel, dtype=torch.float64)
        for step in range(5):
            x = draw(10 * step + rank, dtype)
            expected += average(x.float())
            feedback.mean_(x, state, collectives)
            assert_same_on_all_ranks(x, collectives)
            expected -= x.double()
            assert expected.norm() > 1
            assert error(average(state.entries["residual"]), expected) < 1e-5
        for q in bases(state.inner[0]).values():
            assert_same_on_all_ranks(q, collectives)


def two_small_all_reduces_are_sent(rank):
    collectives, compressor = Collectives(), PowerSGD(2)
    compressor.mean_(draw(rank), compressor.init(MODEL, CPU), collectives)
    matrices = Matrices.of(MODEL, 2, 2.0, singly=True)
    entries = matrices.num_left + matrices.num_right + matrices.num_others
    assert collectives.stats.payload_bytes == 4 * entries < MODEL.numel
    assert collectives.stats.wire_bytes == pytest.approx(4 * entries * 2 * 2 / 3)
    assert collectives.stats.encode_seconds > 0
    assert collectives.stats.decode_seconds > 0


def a_mean_of_equals_is_a_message(rank):
    compressor, x = PowerSGD(2), draw(3)
    message = send(compressor, x, compressor.init(MODEL, CPU))
    compressor.mean_(x, compressor.init(MODEL, CPU), Collectives())
    assert error(x, message) < 1e-5


def nan_of_one_rank_reaches_all_but_leaves_no_trace(rank):
    for bad, dtype in zip((math.nan, math.inf, -math.inf), TOLERANCE, strict=True):
        feedback, collectives = ErrorFeedback(PowerSGD(2)), Collectives()
        state = feedback.init(MODEL, CPU, rank)
        feedback.mean_(draw(rank, dtype), state, collectives)
        before, residual = bases(state.inner[0]), state.entries["residual"]
        x = draw(10 + rank, dtype)
        if rank == 1:
            piece(x, "p0")[3, 4] = bad
            piece(x, "p1")[5] = bad
        feedback.mean_(x, state, collectives)
        assert piece(x, "p0").isnan().all()
        assert not piece(x, "p1")[5].isfinite()
        assert (~piece(x, "p1").isfinite()).sum() == 1
        assert piece(x, "p3").isfinite().all()
        assert residual.isfinite().all()
        assert piece(residual, "p0").eq(0).all()
        torch.testing.assert_close(
            span(bases(state.inner[0])["p0"]), span(before["p0"]), rtol=0, atol=1e-6
        )
        expected = average(residual)
        x = draw(20 + rank, dtype)
        expected += average(x.float())
        feedback.mean_(x, state, collectives)
        assert error(x.double() + average(residual), expected) < 1e-5
        for q in bases(state.inner[0]).values():
            assert_same_on_all_ranks(q, collectives)


def values_rounded_to_inf_never_reach_the_residual(rank):
    compressor = PowerSGD(1, min_ratio=0)
    layout = BufferLayout((Piece("w", (4, 4)), Piece("b", (1,))))
    x, residual = torch.full((17,), 6e4, dtype=torch.float16), torch.full((17,), 6e4)
    compressor.mean_(x, compressor.init(layout, CPU), Collectives(), residual)
    assert x.isinf().all()
    assert residual.isfinite().all()


def an_overflowing_sum_propagates_but_leaves_no_trace(rank):
    layout = BufferLayout((Piece("w", (40, 30)),))
    feedback, x = ErrorFeedback(PowerSGD(1)), torch.zeros(layout.numel)
    state = feedback.init(layout, CPU, rank)
    x[7] = 3e38
    feedback.mean_(x, state, Collectives())
    assert x.isinf().any()
    assert bases(state.inner[0])["w"].isfinite().all()
    assert state.entries["residual"].isfinite().all()
    x = draw(rank, layout=layout)
    feedback.mean_(x, state, Collectives())
    assert x.isfinite().all()


CASES = [
    means_and_residuals_add_up,
    two_small_all_reduces_are_sent,
    a_mean_of_equals_is_a_message,
    nan_of_one_rank_reaches_all_but_leaves_no_trace,
    values_rounded_to_inf_never_reach_the_residual,
    an_overflowing_sum_propagates_but_leaves_no_trace,
]


# Against torch's hook.


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(40, 30), nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 5)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def gradients_of(ddp, seed):
    ddp.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    ddp(torch.randn(8, 40, generator=generator)).square().mean().backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def state_of_torch(state, parameters, model):
    """Return by name Q, stored by shape, and errors, stored by parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    flat = BufferLayout.of((names[id(each)], each) for each in parameters)
    (error_flat,), (q_flat,) = state.error_dict.values(), state.q_memory_dict.values()
    found = {
        name: {"residual": part.clone()}
        for name, part in zip(flat.names, flat.split(error_flat), strict=True)
    }
    matrices = [each for each in flat.pieces if len(each.shape) == 2 and each.shape[0] > 5]
    shapes = list(dict.fromkeys(each.shape for each in matrices))
    matrices.sort(key=lambda each: shapes.index(each.shape))
    qs = q_flat.split([each.shape[1] * state.matrix_approximation_rank for each in matrices])
    for each, q in zip(matrices, qs, strict=True):
        found[each.name]["0.q"] = q.view(each.shape[1], -1).clone()
    return found


def follow_torch(rank):
    theirs, ours = (DistributedDataParallel(build()) for _ in range(2))
    buckets = []
    power_state = PowerSGDState(None, 3, start_powerSGD_iter=2)

    def noting_hook(state, bucket):
        buckets.append(bucket.parameters())
        return powerSGD_hook(state, bucket)

    theirs.register_comm_hook(power_state, noting_hook)
    state = compress_ddp(ours, ErrorFeedback(PowerSGD(3)))
    for step in range(3):  # two without compression, then one with
        gradients_of(theirs, 10 * step + rank)
        gradients_of(ours, 10 * step + rank)
    saved = copy.deepcopy(state.state_dict())
    for name, tensors in state_of_torch(power_state, buckets[-1], theirs.module).items():
        assert saved["parameters"][name].keys() == tensors.keys()
        saved["parameters"][name] = tensors
    state.load_state_dict(seal(saved))
    for step in range(3, 8):
        wanted, got = (gradients_of(each, 10 * step + rank) for each in (theirs, ours))
        assert all(error(got[name], wanted[name]) < 1e-4 for name in wanted)


def freeze(rank):
    """Send zero gradients without error feedback, by torch's default hook and by ours."""
    theirs, ours = (DistributedDataParallel(build()) for _ in range(2))
    options = {"start_powerSGD_iter": 0, "use_error_feedback": False, "warm_start": False}
    theirs.register_comm_hook(PowerSGDState(None, 2, **options), powerSGD_hook)
    compress_ddp(ours, PowerSGD(2))
    for ddp in (theirs, ours):
        (0 * ddp(torch.ones(1, 40)).sum()).backward()
    assert theirs.module[2].weight.grad.isnan().any()
    assert all(p.grad.eq(0).all() for p in ours.parameters())


def test_means_over_three_ranks(ranks):
    ranks.run(3, call_each, [(case,) for case in CASES])


def test_the_same_gradients_as_torch_from_the_same_q_but_zero_for_zero(ranks):
    ranks.run(3, call_each, [(follow_torch,), (freeze,)])
