"""Which of an optimizer's state moves with the weights."""

import pytest
import torch
from torch import nn

from pyparallel.subnets import CarryState, ResetState


def stepped(make, shape=(2, 3)):
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = make([parameter])
    parameter.grad = torch.ones(shape)
    optimizer.step()
    return optimizer, {"w": parameter}


def test_tensors_of_the_parameters_shape_move(subtests):
    for make, keys in [
        (lambda p: torch.optim.SGD(p, lr=0.1), []),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ["momentum_buffer"]),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (torch.optim.Rprop, ["prev", "step_size"]),
        (torch.optim.Adagrad, ["sum"]),
    ]:
        with subtests.test(str(keys)):
            for shape in [(2, 3), (1,)]:
                optimizer, named = stepped(make, shape)
                assert list(CarryState().carried_state(optimizer, named)["w"]) == keys
                assert ResetState().carried_state(optimizer, named) == {"w": {}}


def test_other_state_is_refused_by_name():
    optimizer, named = stepped(torch.optim.Adafactor, (4, 4))
    with pytest.raises(ValueError, match=r"got \w+ of w: .* use ResetState"):
        CarryState().carried_state(optimizer, named)
    optimizer, named = stepped(lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer.state[named["w"]]["history"] = [torch.zeros(2, 3)]
    with pytest.raises(ValueError, match="got history of w: a list"):
        CarryState().carried_state(optimizer, named)


def test_a_reset_is_the_state_before_the_first_step(subtests):
    for make in [torch.optim.Adam, torch.optim.Adagrad]:
        with subtests.test(make.__name__):
            parameter = nn.Parameter(torch.ones(2))
            optimizer = make([parameter])
            first = {key: dict(value) for key, value in optimizer.state_dict()["state"].items()}
            first = {key: {k: v.clone() for k, v in value.items()} for key, value in first.items()}
            optimizer.param_groups[0]["lr"] = 0.25
            for _ in range(2):
                parameter.grad = torch.ones(2)
                optimizer.step()
                ResetState().on_new_round(optimizer, first)
                state = optimizer.state_dict()["state"]
                assert state.keys() == first.keys()
                for key, values in first.items():
                    assert all(torch.equal(state[key][k], v) for k, v in values.items())
            assert optimizer.param_groups[0]["lr"] == 0.25
            kept, _ = stepped(make)
            before = kept.state_dict()["state"][0].keys()
            CarryState().on_new_round(kept, first)
            assert kept.state_dict()["state"][0].keys() == before


def test_the_step_counter_stays_even_if_the_parameter_has_its_shape():
    optimizer, named = stepped(torch.optim.Adam, ())
    assert list(CarryState().carried_state(optimizer, named)["w"]) == ["exp_avg", "exp_avg_sq"]
