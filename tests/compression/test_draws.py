import torch

from pyparallel.compression import BufferLayout, CompressorState
from pyparallel.compression.draws import uniform

CPU, SHAPE = torch.device("cpu"), torch.Size((1000,))


def draw(name="a", rank=0, step=1, seed=0):
    return uniform(SHAPE, CompressorState(BufferLayout.flat(1000, name), rank, step), seed, CPU)


def test_draws_are_uniform_below_one():
    numbers = draw()
    assert numbers.dtype == torch.float32
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert numbers.histc(4, 0, 1).min() > 200


def test_equal_seeds_draw_alike_and_others_differ():
    assert torch.equal(draw(), draw())
    others = [draw(name="b"), draw(rank=1), draw(step=2), draw(seed=1), draw(seed=2**40)]
    for i, one in enumerate([draw(), *others]):
        for other in [draw(), *others][:i]:
            assert (one == other).float().mean() < 0.01


def test_the_global_generator_is_not_used():
    before = torch.get_rng_state()
    draw()
    assert torch.equal(torch.get_rng_state(), before)
