"""16-bit parameters with float32 masters, against float32 copies in plain PyTorch."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import pyparallel.optim
from pyparallel.gossip import validation as gossip_validation
from pyparallel.optim import SGD, AdamW
from pyparallel.subnets import validation as subnets_validation
from tests.optim.pairs import make_parameters

BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
OPTIONS = {
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
}


class Plain:
    """Float32 copies of 16-bit parameters, which an optimizer steps; the parameters are rounded."""

    def __init__(self, make, parameters, **options):
        self.parameters = parameters
        self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
        self.optimizer = make(self.masters, **options)

    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def set_gradients(parameters, generator, missing=()):
    for index, p in enumerate(parameters):
        gradient = torch.randn(p.shape, generator=generator).to(p.grad_dtype or p.dtype)
        p.grad = None if index in missing else gradient


def train(optimizer, parameters, steps=20, seed=2):
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps):
        set_gradients(parameters, generator, (1,) if number % 3 == 1 else ())
        optimizer.step()


def assert_equal(found, wanted):
    torch.testing.assert_close(list(found), list(wanted), rtol=0, atol=0)


def masters_of(optimizer, parameters):
    return [optimizer.state[p]["master_param"] for p in parameters]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_is_that_of_float32_copies(name):
    for dtype in (BFLOAT, HALF):
        own, others, fused = (make_parameters(dtype) for _ in range(3))
        kind, options = getattr(pyparallel.optim, name), OPTIONS[name]
        optimizer = kind(own, **options, master_weights=True)
        plain = Plain(kind, others, **options)
        torchs = Plain(getattr(torch.optim, name), fused, foreach=False, **options)
        for each, parameters in ((optimizer, own), (plain, others), (torchs, fused)):
            train(each, parameters)
        # Bit for bit the fused step of float32 parameters; torch's has other roundings.
        assert_equal(own, others)
        assert_equal(masters_of(optimizer, own), plain.masters)
        torch.testing.assert_close(
            masters_of(optimizer, own), torchs.masters, rtol=1e-5, atol=1e-6, check_dtype=True
        )
        for p in own:
            states = {n: v for n, v in optimizer.state[p].items() if n != "step"}
            assert {value.dtype for value in states.values()} == {FLOAT}
            assert p.dtype == dtype


def test_steps_too_small_for_16_bits_add_up():
    parameter = nn.Parameter(torch.ones(5, dtype=BFLOAT))
    optimizer = SGD([parameter], lr=1e-4, master_weights=True)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((5,), 0.99, dtype=BFLOAT))


def test_float32_parameters_have_no_copies():
    own, others = make_parameters(), make_parameters()
    optimizer, plain = AdamW(own, master_weights=True), AdamW(others)
    train(optimizer, own)
    train(plain, others)
    assert_equal(own, others)
    assert all("master_param" not in optimizer.state[p] for p in own)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_resumes_bit_for_bit(name, tmp_path):
    kind, options = getattr(pyparallel.optim, name), OPTIONS[name]
    own = make_parameters(BFLOAT)
    optimizer = kind(own, **options, master_weights=True)
    train(optimizer, own)
    torch.save({"optimizer": optimizer.state_dict(), "model": own}, tmp_path / "state")
    for model_first, before in product((True, False), (0, 2)):
        others = make_parameters(BFLOAT)
        resumed = kind(others, **options, master_weights=True)
        train(resumed, others, before, seed=3)
        saved = torch.load(tmp_path / "state", weights_only=False)
        for loads_model in (model_first, not model_first):
            if not loads_model:
                resumed.load_state_dict(saved["optimizer"])
                continue
            with torch.no_grad():
                for p, value in zip(others, saved["model"], strict=True):
                    p.copy_(value)
        mine = copy.deepcopy(own), copy.deepcopy(optimizer.state_dict())
        continued = kind(mine[0], **options, master_weights=True)
        continued.load_state_dict(mine[1])
        train(continued, mine[0], seed=4)
        train(resumed, others, seed=4)
        assert_equal(others, mine[0])
        assert_equal(masters_of(resumed, others), masters_of(continued, mine[0]))
    train(optimizer, own, seed=4)
    assert_equal(own, others)
    assert_equal(masters_of(optimizer, own), masters_of(resumed, others))


def test_a_copy_keeps_its_masters():
    own = make_parameters(BFLOAT)
    optimizer = AdamW(own, master_weights=True)
    train(optimizer, own)
    copied = copy.deepcopy(optimizer)
    others = [p for group in copied.param_groups for p in group["params"]]
    for each, parameters in ((optimizer, own), (copied, others)):
        train(each, parameters, seed=3)
    assert_equal(masters_of(optimizer, own), masters_of(copied, others))


def test_a_state_without_masters_is_loaded():
    own, others = make_parameters(BFLOAT), make_parameters(BFLOAT)
    optimizer = AdamW(own)
    train(optimizer, own)
    other = AdamW(others, master_weights=True)
    other.load_state_dict(optimizer.state_dict())
    train(other, others, steps=1)
    assert all(each["exp_avg"].dtype == FLOAT for each in other.state.values())


def test_weights_that_others_write_are_taken_over():
    own = make_parameters(BFLOAT)
    optimizer = SGD(own, lr=0.5, master_weights=True)
    train(optimizer, own)
    before = [each.clone() for each in masters_of(optimizer, own)]
    with torch.no_grad():
        own[0][3].fill_(2.0)
    set_gradients(own, torch.Generator(), missing=range(1, 5))
    optimizer.step()
    after = masters_of(optimizer, own)
    wanted = before[0].clone()
    wanted[3] = 2.0
    torch.testing.assert_close(after[0], wanted - 0.5 * own[0].grad.float())
    assert_equal(after[1:], before[1:])


def test_grad_scaler_skips_and_unscales():
    own, others = make_parameters(HALF, [(4, 3)]), make_parameters(HALF, [(4, 3)])
    optimizer = AdamW(own, master_weights=True)
    plain = AdamW(others, master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for gradient in (0.5, float("inf"), 0.25):
        own[0].grad = None
        scaler.scale((own[0].float() * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if gradient < 1:
            others[0].grad = torch.full_like(others[0], gradient)
            plain.step()
    assert scaler.get_scale() == 4.0
    assert_equal(masters_of(optimizer, own), masters_of(plain, others))
    assert_equal(own, others)


def test_gradients_accumulate_in_the_dtype_that_torch_is_told():
    for dtype in (BFLOAT, FLOAT):
        parameter = nn.Parameter(torch.zeros(3, dtype=BFLOAT))
        parameter.grad_dtype = dtype
        optimizer = SGD([parameter], lr=1.0, master_weights=True)
        for _ in range(300):  # bfloat16 counts to 256
            parameter.sum().backward()
        optimizer.step()
        expected = -300.0 if dtype == FLOAT else -256.0
        assert optimizer.state[parameter]["master_param"].tolist() == [expected] * 3


def test_trainers_that_average_parameters_refuse_them():
    model = nn.Linear(3, 2).to(BFLOAT)
    optimizer = SGD(model.parameters(), master_weights=True)
    problems = (
        gossip_validation.find_validation_error(model, [optimizer], None),
        subnets_validation.find_optimizer_error(optimizer, list(model.parameters())),
    )
    for problem in problems:
        assert "master_weights=False, got True: " in problem
        assert problem.endswith("train float32 parameters inside torch.autocast")
