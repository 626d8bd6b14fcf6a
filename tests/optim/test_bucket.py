"""States and gradients in flat buckets, in all the ways in which users handle them."""

import pytest
import torch
from torch import nn

from pyparallel.optim import SGD, Adam
from tests.optim.pairs import ALL, Pair


def test_states_are_views_of_flat_buffers():
    for name, options in ALL.items():
        pair = Pair(name, **options)
        pair.step()
        states = [pair.ours.state[own] for own, _ in pair.parameters() if own.numel()]
        for key in states[0]:
            assert len({state[key].untyped_storage().data_ptr() for state in states}) == 1


def test_states_edited_replaced_and_deleted_by_the_user():
    def scale(state, parameter):
        for key, value in state.items():
            if key != "step":
                value.mul_(2)

    def replace(state, parameter):
        for key, value in list(state.items()):
            state[key] = value.clone() + 1

    def replace_all(state, parameter):
        kept = {key: value.clone() for key, value in state.items()}
        state.clear()
        state.update(kept)

    def count_as_number(state, parameter):
        if "step" in state:
            state["step"] = torch.tensor(17.0, dtype=torch.float64)

    for name, options in ALL.items():
        pair = Pair(name, lr=1e-2, **options)
        for edit in (scale, replace, replace_all, count_as_number):
            pair.step(times=2)
            for index in (1, 4):
                for each, parameter in zip(pair.both, pair.parameters()[index], strict=True):
                    edit(each.state[parameter], parameter)
            pair.step()
            pair.check()
        for each, parameter in zip(pair.both, pair.parameters()[2], strict=True):
            del each.state[parameter]
        pair.step()
        pair.check()
        for each in pair.both:
            each.state.clear()
        pair.step(missing=(1,))
        pair.step()
        pair.check()


def test_one_deleted_state_starts_again_at_zero():
    pair = Pair("Adam", lr=1e-2)
    pair.step(times=2)
    own, other = pair.parameters()[0]
    del pair.ours.state[own]["exp_avg"]
    pair.theirs.state[other]["exp_avg"].zero_()
    pair.step()
    pair.check()


def test_a_state_of_another_size_is_refused():
    pair = Pair("Adam")
    pair.step()
    own, _ = pair.parameters()[0]
    for shape, rule in ((), "must have the parameter's shape"), ((7, 33), "size"):
        pair.ours.state[own]["exp_avg"] = torch.zeros(shape)
        with pytest.raises((ValueError, RuntimeError), match=rule):
            pair.ours.step()


def test_steps_skipped_on_the_device_with_missing_gradients():
    """The host does not know which counts are equal, and steps none with the count of another."""
    pair = Pair("Adam", lr=1e-2, torch_options={"fused": True})
    rows = [((1,), 0), ((2,), 1), ((), 0), ((1,), 1), ((2,), 1), ((0, 4), 0), ((), 1), ((3,), 0)]
    for missing, found_inf in rows:
        for each in pair.both:
            each.found_inf = torch.tensor(float(found_inf))
        pair.step(missing)
        pair.check()


def test_all_steps_skipped():
    """Nothing is predicted from counts and moments that are 0."""
    pair = Pair("AdamW", torch_options={"fused": True})
    for each in pair.both:
        each.found_inf = torch.ones(())
    pair.step()
    ahead = torch.empty_like(pair.ours._weights[0].buffers[0])
    pair.ours.predict_bucket(0, 2, ahead)
    assert torch.equal(ahead, pair.ours._weights[0].buffers[0])


def test_gradients_of_any_strides():
    transposed = nn.Parameter(torch.randn(5, 4).t())
    image = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    flat, number = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(()))
    start = [transposed, image, flat, number]

    def gradients(p):
        dense = torch.randn(p.shape)
        yield dense
        yield torch.randn((*p.shape, 2))[..., 0]
        yield torch.ones(()).expand(p.shape)
        yield torch.empty_like(p).copy_(dense)
        if p.dim() == 2:
            yield torch.randn(p.shape[::-1]).t()
        if p.dim() == 4:
            yield dense.to(memory_format=torch.channels_last)

    for name, options in ALL.items():
        for p in start:
            for companion in (None, torch.zeros(3)):

                def make(p=p, companion=companion):
                    rest = [] if companion is None else [nn.Parameter(companion.clone())]
                    return [nn.Parameter(p.detach().clone()), *rest]

                pair = Pair(name, make, lr=1e-2, **options)
                torch.manual_seed(0)
                for gradient in gradients(p):
                    for parameter in pair.parameters()[0]:
                        parameter.grad = gradient
                    kept = gradient.clone()
                    for each in pair.both:
                        each.step()
                    torch.testing.assert_close(gradient, kept, rtol=0, atol=0)
                pair.check()
                assert pair.parameters()[0][0].stride() == p.stride()


def test_empty_parameters_and_groups():
    def make():
        shapes = [(0,), (3,), (2, 0), (0,), (4,), (0,)]
        groups = [[nn.Parameter(torch.ones(s)) for s in shapes], [], [nn.Parameter(torch.ones(0))]]
        return [{"params": group} for group in groups]

    for name, options in ALL.items():
        pair = Pair(name, make, **options)
        for missing in ((), (0,), (1, 3), (2, 4), range(7), ()):
            pair.step(missing)
            pair.check()


def test_a_step_reads_gradients_without_writing_or_keeping_them():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = SGD([parameter], lr=1.0)
    for momentum in (0.0, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        gradient = parameter.grad = torch.ones(3)
        optimizer.step()
        assert gradient.tolist() == [1, 1, 1]
        if momentum:
            buffer = optimizer.state[parameter]["momentum_buffer"]
            assert buffer.data_ptr() != gradient.data_ptr()


def test_a_parameter_changed_between_forward_and_backward_is_noticed():
    """As with torch's optimizers; autograd would else use the new values."""
    layer = nn.Linear(3, 3)
    optimizer = Adam(layer.parameters())
    frozen = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [frozen]})
    for _ in range(2):
        x = torch.ones(1, 3, requires_grad=True)
        output, other = layer(x).sum(), (frozen * x).sum()
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        other.backward()  # not stepped
        frozen.grad = None
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()
