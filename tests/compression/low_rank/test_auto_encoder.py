"""The auto-encoder: torch's convolutions, shares that add up, equal training on all ranks."""

import pytest
import torch
from torch.nn import functional

from pyparallel.compression import Collectives, ConvAutoEncoder
from pyparallel.compression.low_rank.auto_encoder import (
    decode_mean,
    init_training_state,
    train_step_,
)

CPU = torch.device("cpu")
SMALL = ConvAutoEncoder(channels=(4, 8), code_channels=2)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def waves(step, rank=0, numel=200):
    """Return smooth numbers, mostly the same on all ranks."""
    places = torch.linspace(0, 6, numel)
    return torch.sin(places + step) + 0.1 * torch.sin(2 * places + rank)


def test_codes_are_a_quarter_of_the_padded_length(subtests):
    for numel in [1, 15, 16, 17, 1000]:
        with subtests.test(str(numel)):
            auto_encoder = ConvAutoEncoder()
            weights = auto_encoder.init(CPU)
            code = auto_encoder.encode(weights, draw(numel))
            assert code.shape == (4 * ((numel + 15) // 16),)
            assert auto_encoder.decode(weights, code, numel).shape == (numel,)


def test_layers_are_the_convolutions_of_torch():
    weights, values = SMALL.init(CPU), draw(40)
    shapes = [(4, 1, 4), (8, 4, 4), (2, 8, 1), (16, 2, 3), (8, 8, 3), (1, 4, 1)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    assert sum(sizes) == SMALL.num_weights == len(weights)
    kernels = [part.view(shape) for part, shape in zip(weights.split(sizes), shapes, strict=True)]
    x = values.view(1, 1, -1)
    for kernel in kernels[:2]:
        x = functional.leaky_relu(functional.conv1d(x, kernel, stride=2, padding=1), 0.1)
    code = functional.conv1d(x, kernels[2])
    torch.testing.assert_close(SMALL.encode(weights, values), code.flatten())
    x = code
    for kernel in kernels[3:5]:
        x = functional.leaky_relu(functional.conv1d(x, kernel, padding=1), 0.1)
        first, second = x.chunk(2, dim=1)
        x = torch.stack([first, second], dim=-1).flatten(2)
    expected = functional.conv1d(x, kernels[5]).flatten()
    torch.testing.assert_close(SMALL.decode(weights, code.flatten(), 40), expected)
    torch.testing.assert_close(SMALL.decode(weights, code.flatten(), 37), expected[:37])


def test_both_functions_are_homogeneous():
    weights, values = SMALL.init(CPU), draw(40)
    code = SMALL.encode(weights, values)
    assert torch.equal(SMALL.encode(weights, 2.0**-20 * values), 2.0**-20 * code)
    small, large = (SMALL.decode(weights, factor * code, 40) for factor in (1, 1024))
    assert torch.equal(large, 1024 * small)


def test_initial_weights_depend_on_the_seed():
    assert torch.equal(SMALL.init(CPU), SMALL.init(CPU))
    other = ConvAutoEncoder(SMALL.channels, SMALL.code_channels, seed=1)
    assert not torch.equal(SMALL.init(CPU), other.init(CPU))
    assert ConvAutoEncoder().num_weights == 21008  # as in Learned's docstring


def test_shares_add_up_to_the_decoded_mean():
    weights, codes = SMALL.init(CPU).double(), draw(3, 20).double()
    mean_code = codes.mean(0)
    decoded = SMALL.decode(weights, mean_code, 37)
    jacobian = torch.autograd.functional.jacobian(
        lambda code: SMALL.decode(weights, code, 37), mean_code
    )
    shares = []
    for code in codes:
        whole, share = decode_mean(SMALL, weights, code, mean_code, 37)
        assert torch.equal(whole, decoded)
        shares.append(share)
        torch.testing.assert_close(share, decoded + jacobian @ (code - mean_code))
    torch.testing.assert_close(torch.stack(shares).mean(0), decoded)
    assert not torch.allclose(shares[0], decoded)


def test_the_loss_falls(subtests):
    for scale in [1e-4, 1e-25, 1e25]:
        with subtests.test(str(scale)):
            auto_encoder = ConvAutoEncoder()
            state = init_training_state(auto_encoder, CPU)
            losses = []
            for step in range(60):
                values = scale * waves(step)
                train_step_(auto_encoder, state, values, values, Collectives(), 0.01)
                losses.append(float(state["loss"]))
            assert min(losses[:3]) > 0.5
            assert max(losses[-10:]) < 0.1


def test_non_finite_gradients_are_skipped(subtests):
    for bad in [float("nan"), float("inf")]:
        with subtests.test(str(bad)):
            state = init_training_state(SMALL, CPU)
            train_step_(SMALL, state, waves(0), waves(0), Collectives(), 0.01)
            before = {key: state[key].clone() for key in ("weights", "velocity")}
            poisoned = waves(1)
            poisoned[3] = bad
            train_step_(SMALL, state, poisoned, poisoned, Collectives(), 0.01)
            assert all(torch.equal(state[key], before[key]) for key in before)
            train_step_(SMALL, state, torch.zeros(200), torch.zeros(200), Collectives(), 0.01)
            assert all(state[key].isfinite().all() for key in before)


def test_a_step_is_bounded():
    state = init_training_state(SMALL, CPU)
    before = state["weights"].clone()
    values = torch.zeros(200)
    values[7] = 1e6  # one outlier: the gradient is large at any scale
    state["weights"].mul_(30)
    train_step_(SMALL, state, values, values, Collectives(), 0.01)
    assert float((state["weights"] - 30 * before).norm()) == pytest.approx(0.01, rel=1e-2)


def test_an_empty_network_is_rejected(subtests):
    for options, sentence in [
        ({"channels": ()}, "channels must be one or more numbers, got none"),
        ({"channels": (4, 0)}, r"channels\[1\] must be a positive integer, got 0"),
        ({"code_channels": 0}, "code_channels must be a positive integer, got 0"),
    ]:
        with subtests.test(str(options)), pytest.raises(ValueError, match=sentence):
            ConvAutoEncoder(**options)


def learn(rank):
    state = init_training_state(SMALL, CPU)
    for step in range(3):
        mean = sum(waves(step, each) for each in range(3)) / 3
        train_step_(SMALL, state, waves(step, rank), mean, Collectives(), 0.01)
    return state


def test_three_ranks_train_like_one_with_all_values(ranks):
    states = ranks.run(3, learn)
    for key in states[0]:
        assert all(torch.equal(each[key], states[0][key]) for each in states), key
    weights = SMALL.init(CPU).requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.01, momentum=0.9)
    for step in range(3):
        values = [waves(step, each) for each in range(3)]
        mean = sum(values) / 3
        scale = mean.square().mean().sqrt()
        code = sum(SMALL.encode(weights, each / scale) for each in values) / 3
        loss = functional.mse_loss(SMALL.decode(weights, code, 200), mean / scale)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weights], 1.0)
        optimizer.step()
    torch.testing.assert_close(states[0]["weights"], weights.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states[0]["loss"], loss.detach(), atol=1e-5, rtol=1e-4)
