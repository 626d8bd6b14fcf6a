"""Preconditioned shares: their factors, and where they can be attached."""

import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel.comm import DisagreementError
from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Cast,
    Chain,
    Collectives,
    Diagonal,
    ErrorFeedback,
    Finite,
    HeterogeneousPermK,
    PermK,
    PerParameter,
    ScaledPermK,
    Switch,
    ddp_hook,
)
from tests.compression.means import gradient

CPU = torch.device("cpu")
NUMEL = 345


def diagonal(seed, numel=NUMEL):
    generator = torch.Generator().manual_seed(seed)
    return 0.1 + torch.rand(numel, generator=generator, dtype=torch.float64)


ROWS = torch.stack([diagonal(rank) for rank in range(3)])
SCALED = ScaledPermK(Diagonal({"*": ROWS[0]}), num_ranks=3)
HETEROGENEOUS = HeterogeneousPermK(tuple(Diagonal({"*": row}) for row in ROWS))
WEIGHTS = {  # factors of PermK's sketches
    SCALED: ROWS[0].rsqrt().expand(3, NUMEL),
    HETEROGENEOUS: ROWS.rsqrt() / 3**0.5,
}
every_sketch = pytest.mark.parametrize("sketch", WEIGHTS, ids=lambda s: type(s).__name__)


def send(sketch, x, rank):
    layout = BufferLayout.flat(NUMEL)
    message = sketch.compress(x, sketch.init(layout, CPU, rank))
    return sketch.decompress(message, layout, torch.empty_like(x))


@every_sketch
def test_a_sketch_is_perm_k_s_times_the_inverse_roots_of_the_rank_s_diagonal(sketch):
    for rank in range(3):
        x = gradient(rank, 0, NUMEL)
        plain = send(PermK(num_ranks=3), x, rank)
        torch.testing.assert_close(send(sketch, x, rank), plain * WEIGHTS[sketch][rank].float())


def test_a_diagonal_of_ones_changes_nothing():
    ones = Diagonal({"*": 1.0})
    x = gradient(0, 0, NUMEL)
    for rank in range(3):
        plain = send(PermK(num_ranks=3), x, rank)
        assert torch.equal(send(ScaledPermK(ones, num_ranks=3), x, rank), plain)
        torch.testing.assert_close(send(HeterogeneousPermK((ones,) * 3), x, rank), plain / 3**0.5)


@every_sketch
def test_decoding_does_not_need_the_diagonal(sketch):
    layout, x = BufferLayout.flat(NUMEL), gradient(1, 0, NUMEL)
    message = sketch.compress(x, sketch.init(layout, CPU, 1))
    read = PermK(num_ranks=3).decompress(message, layout, torch.empty_like(x))
    assert torch.equal(read, send(sketch, x, 1))


@every_sketch
def test_it_is_biased_and_takes_no_residual(sketch):
    assert not sketch.unbiased
    assert contraction(sketch, BufferLayout.flat(NUMEL)) is None
    for wrapped in (
        sketch,
        Chain(sketch, Cast()),
        PerParameter({"*": sketch}),
        Finite(sketch),
        Switch({0: sketch}),
    ):
        with pytest.raises(ValueError, match=r"must take a residual.*use PermK"):
            ErrorFeedback(wrapped)
        state = wrapped.init(BufferLayout.flat(NUMEL), CPU)
        with pytest.raises(ValueError, match="residual must be None for"):
            wrapped.compress(gradient(0, 0, NUMEL), state, torch.zeros(NUMEL))


@every_sketch
def test_it_supports_ddp_alone(sketch):
    assert sketch.validation_error(AttachPoint.DDP) is None
    for place in AttachPoint:
        if place is not AttachPoint.DDP:
            assert f"for {place.value}" in sketch.validation_error(place)


def test_the_diagonals_are_part_of_the_repr():
    other = ROWS.clone()
    other[2, 7] += 1e-9
    assert repr(HETEROGENEOUS) == repr(HeterogeneousPermK(tuple(map(same_diagonal, ROWS))))
    assert repr(HETEROGENEOUS) != repr(HeterogeneousPermK(tuple(map(same_diagonal, other))))
    assert (
        repr(SCALED)
        == f"ScaledPermK(diagonal={same_diagonal(ROWS[0])}, seed=0, num_ranks=3, run_length=32)"
    )


def same_diagonal(row):
    return Diagonal({"*": row})


def test_bad_arguments_are_rejected():
    for wrong in (torch.ones(3), 2.0, None):
        with pytest.raises(TypeError, match="diagonal must be an object such as Diagonal"):
            ScaledPermK(wrong)
        with pytest.raises(TypeError, match="diagonal must be an object such as Diagonal"):
            HeterogeneousPermK((same_diagonal(ROWS[0]), wrong))
    with pytest.raises(ValueError, match=r"diagonals must be a tuple of one .*, got an empty"):
        HeterogeneousPermK(())
    for wrong in ([same_diagonal(ROWS[0])], same_diagonal(ROWS[0])):
        with pytest.raises(TypeError, match="diagonals must be a tuple of one Diagonal per rank"):
            HeterogeneousPermK(wrong)
    with pytest.raises(ValueError, match="run_length must be"):
        HeterogeneousPermK((same_diagonal(2.0),), run_length=0)
    with pytest.raises(ValueError, match="num_ranks must be >= 1"):
        ScaledPermK(same_diagonal(2.0), num_ranks=0)
    undeclared = ScaledPermK(same_diagonal(2.0))
    with pytest.raises(ValueError, match=r"for single messages of ScaledPermK"):
        undeclared.compress(torch.ones(3), undeclared.init(BufferLayout.flat(3), CPU))
    with pytest.raises(ValueError, match="diagonals must be one for each of 4 ranks, got 3"):
        HETEROGENEOUS.for_num_ranks(4)
    with pytest.raises(ValueError, match="got 3 on rank 3"):
        HETEROGENEOUS.init(BufferLayout.flat(NUMEL), CPU, 3)
    with pytest.raises(ValueError, match=r"got \[345\] for '\*', but buffer has shape \[9\]"):
        SCALED.init(BufferLayout.flat(9), CPU)


def check_on_rank(rank):
    collectives, layout = Collectives(), BufferLayout.flat(NUMEL)
    shown = PermK().init(layout, CPU, rank)
    owners = torch.full((NUMEL,), float(rank))
    PermK().mean_(owners, shown, collectives)
    for sketch, weights in WEIGHTS.items():
        x = gradient(rank, 0, NUMEL)
        sketch.mean_(x, sketch.init(layout, CPU, rank), collectives)
        sent = torch.stack([gradient(each, 0, NUMEL) for each in range(3)]) * weights
        expected = sent.gather(0, owners.long()[None])[0]
        torch.testing.assert_close(x, expected.float(), msg=lambda m, s=sketch: f"{s}: {m}")
        chained, y = Chain(sketch, Cast()), gradient(rank, 0, NUMEL)
        chained.mean_(y, chained.init(layout, CPU, rank), collectives)
        torch.testing.assert_close(y, x, rtol=2**-8, atol=1e-6)
    short = HeterogeneousPermK(HETEROGENEOUS.diagonals[:2])
    with pytest.raises(ValueError, match="one for each"):
        short.mean_(x, short.init(layout, CPU, min(rank, 1)), collectives)
    per_parameter = PerParameter({"0.bias": Cast(), "*": ScaledPermK(same_diagonal(4.0))})
    mine = ScaledPermK(same_diagonal(ROWS[rank]))
    with pytest.raises(DisagreementError, match="compressor"):
        ddp_hook(mine)
    return train(per_parameter)


def train(compressor):
    """Check a DDP step: gradients are the uncompressed ones times the inverse roots of 4."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(*ddp_hook(compressor, ddp))
    ddp(torch.arange(6.0)).sum().backward()
    return model[0].weight.grad, model[0].bias.grad


def test_means_over_ranks(ranks):
    for weight, bias in ranks.run(3, check_on_rank):
        torch.testing.assert_close(weight, torch.arange(6.0).expand(5, 6) / 2)
        torch.testing.assert_close(bias, torch.ones(5))
