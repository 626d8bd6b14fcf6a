"""Fused optimizers as drop-ins: whatever users do with torch's works, and does the same."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial
from itertools import chain, product

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyparallel.optim
from pyparallel import SubnetTrainer
from pyparallel.optim import SGD, Adam, AdamW
from pyparallel.subnets import CarryState, Partition, ResetState
from tests.optim.pairs import ALL, Pair, make_parameters
from tests.workers import on_ranks


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    return layers.to(dtype)


def both(name, **options):
    """A model with a fused optimizer, and one with torch's."""
    models = model(), model()
    modules = pyparallel.optim, torch.optim
    return [
        (m, getattr(module, name)(m.parameters(), **options))
        for m, module in zip(models, modules, strict=True)
    ]


def train(m, optimizer, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=generator)
        m(x.to(next(m.parameters()))).square().mean().backward()
        optimizer.step()


def assert_trained_alike(pairs, **tolerance):
    (ours, _), (theirs, _) = pairs
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), **tolerance)


@pytest.mark.slow
def test_many_steps_with_groups_schedulers_and_missing_gradients():
    def make():
        first, second = make_parameters(), make_parameters(shapes=((7,), (2, 2)))
        return [{"params": first}, {"params": second, "lr": 3e-3, "weight_decay": 0.1}]

    for name, options in ALL.items():
        pair = Pair(name, make, lr=1e-3, **options)
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 200) for o in pair.both]
        for number in range(200):
            pair.step(missing=(number % 7, 5) if number % 3 == 0 else ())
            for each in schedulers:
                each.step()
        pair.check(rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}])
def test_state_dicts_are_exchanged_with_torchs(implementation):
    for name, options in ALL.items():
        pairs = both(name, lr=1e-2, **options)
        (_, own), (theirs, _) = pairs
        other = getattr(torch.optim, name)(
            theirs.parameters(), lr=1e-2, **options, **implementation
        )
        pairs[1] = theirs, other
        for m, optimizer in pairs:
            train(m, optimizer)
        own_state, state = own.state_dict(), other.state_dict()
        assert own_state["state"].keys() == state["state"].keys()
        for index, found in state["state"].items():
            assert own_state["state"][index].keys() == found.keys()
            for key, value in found.items():
                mine = own_state["state"][index][key]
                assert (mine.shape, mine.dtype) == (value.shape, value.dtype), key
        group, own_group = state["param_groups"][0], own_state["param_groups"][0]
        assert own_group.keys() == group.keys()
        crossed = copy.deepcopy(own_state), copy.deepcopy(state)
        own.load_state_dict(crossed[1])
        other.load_state_dict(crossed[0])
        for m, optimizer in pairs:
            train(m, optimizer, seed=1)
        assert_trained_alike(pairs)
        assert own.param_groups[0]["lr"] == 1e-2


def test_a_capturable_state_is_exchanged_and_stepped():
    """torch steps it on accelerators only; ours also on CPUs."""
    parameters = make_parameters()
    ours = Adam(parameters, capturable=True)
    plain = Pair("Adam")
    for own, other in zip(parameters, plain.theirs.param_groups[0]["params"], strict=True):
        own.grad, other.grad = torch.ones_like(own), torch.ones_like(other)
    ours.step()
    plain.theirs.step()
    theirs = torch.optim.Adam(plain.theirs.param_groups[0]["params"], capturable=True)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.param_groups[0]["capturable"] = False
    ours.step()
    theirs.step()
    for own, other in zip(parameters, theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(own.detach(), other.detach())


def test_a_run_resumes_from_a_file_bit_for_bit():
    for (name, options), assign in product(ALL.items(), (False, True)):
        m = model()
        optimizer = getattr(pyparallel.optim, name)(m.parameters(), **options)
        train(m, optimizer)
        file = io.BytesIO()
        torch.save({"model": m.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(m, optimizer, seed=1)
        expected = copy.deepcopy(m.state_dict())
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        m.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(m, optimizer, seed=1)
        assert all(torch.equal(expected[key], value) for key, value in m.state_dict().items())
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other = model()
        other.load_state_dict(saved["model"], assign=assign)
        resumed = getattr(pyparallel.optim, name)(other.parameters(), **options)
        resumed.load_state_dict(saved["optimizer"])
        train(other, resumed, seed=1)
        assert all(torch.equal(expected[key], value) for key, value in other.state_dict().items())


def test_copies_and_pickles_go_their_own_way():
    for name, options in ALL.items():
        pairs = both(name, lr=1e-2, **options)
        for m, optimizer in pairs:
            train(m, optimizer)
        start = copy.deepcopy(pairs[0][0].state_dict())
        for duplicate in (
            copy.deepcopy,
            lambda both: pickle.loads(pickle.dumps(both)),
        ):
            copies = [duplicate(each) for each in pairs]
            for m, optimizer in copies:
                train(m, optimizer, seed=1)
            assert_trained_alike(copies)
            for key, value in pairs[0][0].state_dict().items():
                assert torch.equal(value, start[key])
        for m, optimizer in pairs:
            train(m, optimizer, seed=1)
        assert_trained_alike(pairs)
        assert_trained_alike([pairs[0], copies[0]], rtol=0, atol=0)


def test_an_unused_optimizer_is_released():
    optimizer = Adam(make_parameters())
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    gone = weakref.ref(optimizer)
    parameters = optimizer.param_groups[0]["params"]
    del optimizer
    gc.collect()
    assert gone() is None
    assert all(p.isfinite().all() for p in parameters)


def test_groups_added_later_frozen_and_unfrozen_parameters():
    for name, options in ALL.items():
        pair = Pair(name, lr=1e-2, **options)
        frozen = pair.parameters()[3:]
        for p in [p for both_of in frozen for p in both_of]:
            p.requires_grad_(False)
        pair.step(missing=(3, 4))
        for each in pair.both:
            extra = nn.Parameter(torch.ones(3, 4))
            each.add_param_group({"params": [extra], "lr": 0.1})
        pair.step(missing=(3, 4))
        pair.check()
        for p in [p for both_of in frozen for p in both_of]:
            p.requires_grad_(True)
        for p in pair.parameters()[0]:
            p.requires_grad_(False)
        pair.step(missing=(0,), times=2)
        pair.check()
        pair.step()  # a gradient from before it was frozen is applied
        pair.check()


def test_groups_edited_by_hand():
    for name, options in ALL.items():
        pair = Pair(name, lr=1e-2, **options)
        pair.step()
        for each in pair.both:  # another parameter in place of one
            parameters = each.param_groups[0]["params"]
            parameters[0] = nn.Parameter(torch.ones(3, 3))
            parameters.append(nn.Parameter(torch.ones(2)))
        pair.step()
        pair.check()
        for each in pair.both:  # one moves to another group
            each.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.1})
            groups = each.param_groups
            groups[1]["params"].append(groups[0]["params"].pop())
        pair.step()
        pair.check()
        for each in pair.both:
            each.param_groups.reverse()
        pair.step()
        pair.check()
        for each in pair.both:
            del each.param_groups[0]
        pair.step()
        pair.check()


def test_memory_changed_by_others():
    def replaced(p):
        p.data = p.data.clone()

    def transposed(p):
        p.data = p.data.t() if p.dim() == 2 and p.shape[0] == p.shape[1] else p.data

    def swapped(p):
        kept, p.data = p.data, p.data * 0.5
        kept.zero_()

    def written(p):
        with torch.no_grad():
            p.mul_(0.5)

    def vectorized(p):
        vector = torch.nn.utils.parameters_to_vector([p])
        torch.nn.utils.vector_to_parameters(vector, [p])

    for name, options in ALL.items():

        def make():
            return make_parameters(shapes=((3, 3), (4,), ()))

        pair = Pair(name, make, lr=1e-2, **options)
        for change in (replaced, swapped, written, vectorized, transposed):
            pair.step()
            for both_of in pair.parameters():
                for p in both_of:
                    change(p)
            if change is transposed:  # torch keeps the states as they lie
                for each in pair.both:
                    each.state.clear()
            pair.step()
            pair.check()


def test_parameters_sent_to_another_process():
    """Sending moves their memory, which is then shared: updates reach the other process."""
    for name, options in ALL.items():
        pair = Pair(name, lr=1e-2, **options)
        pair.step()
        sent = pair.parameters()[0][0].data
        sent.share_memory_()
        pair.step(times=2)
        pair.check()
        assert sent.is_shared()
        assert torch.equal(sent, pair.parameters()[0][0])


def test_two_optimizers_of_the_same_parameters():
    for name, options in ALL.items():
        pair = Pair(name, lr=1e-2, **options)
        second = [
            getattr(module, name)(parameters, lr=1e-3, **options)
            for module, parameters in zip(
                (pyparallel.optim, torch.optim), zip(*pair.parameters(), strict=True), strict=True
            )
        ]
        for number in range(4):
            pair.step(missing=(number,))
            for each in second:
                each.step()
        pair.check()


def test_half_between_steps():
    m = model()
    optimizer = Adam(m.parameters(), lr=1e-2)
    train(m, optimizer)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        m.to(dtype)
        train(m, optimizer)
        assert {p.dtype for p in m.parameters()} == {dtype}
        assert all(p.isfinite().all() for p in m.parameters())
        states = optimizer.state.values()
        assert {state["exp_avg"].dtype for state in states} == {torch.float32}
    assert {float(state["step"]) for state in optimizer.state.values()} == {12}


def test_closures_hooks_and_contexts():
    calls: list[str] = []
    for name, options in ALL.items():
        pairs = both(name, lr=1e-2, **options)
        for m, optimizer in pairs:
            optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
            optimizer.register_step_post_hook(lambda *_: calls.append("after"))

            def closure(m=m, optimizer=optimizer):
                optimizer.zero_grad()
                loss = m(torch.ones(2, 6)).square().mean()
                loss.backward()
                return loss

            losses = [optimizer.step(closure) for _ in range(3)]
            assert losses[2] < losses[0]
            with torch.no_grad():
                optimizer.step(closure)
            closure()
            with torch.no_grad():
                optimizer.step()
            closure()
            with torch.enable_grad():
                optimizer.step()
        assert_trained_alike(pairs)
        assert all(p.is_leaf for p in pairs[0][0].parameters())
    assert calls == ["before", "after"] * 36


def test_the_first_step_within_inference_mode():
    pairs = both("Adam", lr=1e-2)
    m, optimizer = pairs[0]
    for other, theirs in pairs[1:]:
        train(other, theirs, 2)
    generator = torch.Generator().manual_seed(0)
    for inference in (True, False):
        optimizer.zero_grad()
        m(torch.randn(4, 6, generator=generator)).square().mean().backward()
        with torch.inference_mode(inference):
            optimizer.step()
    assert not any(p.is_inference() for p in m.parameters())
    assert_trained_alike(pairs)


def test_lazy_modules():
    for name, options in ALL.items():
        pairs = []
        for module in (pyparallel.optim, torch.optim):
            m = nn.ModuleDict({"used": nn.LazyLinear(2), "later": nn.LazyLinear(2)})
            pairs.append((m, getattr(module, name)(m.parameters(), lr=1e-2, **options)))
        for m, optimizer in pairs:
            for names in (["used"], ["used", "later"], ["later"]):
                optimizer.zero_grad()
                for key in names:
                    layer = m[key]
                    if isinstance(layer, nn.LazyLinear):
                        layer(torch.ones(1, 3))
                        nn.init.ones_(layer.weight)
                        nn.init.ones_(layer.bias)
                    layer(torch.ones(2, 3)).square().sum().backward()
                optimizer.step()
        assert_trained_alike(pairs)


def test_a_step_for_each_parameter_within_backward():
    models = model(), model()
    for m, cls in zip(models, (AdamW, torch.optim.AdamW), strict=True):
        optimizers = {p: cls([p], lr=1e-2) for p in m.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            m(torch.ones(2, 6)).square().mean().backward()
    assert_trained_alike([(m, None) for m in models])


def test_grad_scaler():
    """Both contracts of GradScaler, with steps that it skips, the first one among them."""
    half, single = torch.float16, torch.float32
    for name, dtype, unscale in (
        *product(ALL, (single,), (False, True)),
        *product(("Adam", "AdamW"), (half,), (False,)),  # 16 bits cannot be unscaled apart
    ):
        options = {"momentum": 0.9, "dampening": 0.1} if name == "SGD" else {}
        pair = Pair(
            name, lambda dtype=dtype: make_parameters(dtype), {"fused": dtype == half}, **options
        )
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in pair.both]
        for number in range(8):
            pair.set_gradients(missing=(4,) if number == 5 else ())
            for optimizer, scaler in zip(pair.both, scalers, strict=True):
                scaler.scale(torch.ones(()))  # which creates the scale
                parameters = [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]
                for p in parameters:
                    p.grad.mul_(scaler.get_scale() * 2.0**-4)
                if number in (0, 3):
                    parameters[0].grad[0, 0] = float("inf")
                if unscale:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(parameters, 3.0)
                scaler.step(optimizer)
                scaler.update()
        assert [scaler.get_scale() for scaler in scalers] == [2.0**8] * 2
        pair.check(**({"rtol": 0, "atol": 0} if dtype == half else {}))
        if name != "SGD":
            assert {float(state["step"]) for state in pair.ours.state.values()} == {5.0, 6.0}


def test_grad_scaler_of_16_bit_sgd():
    """Compared with float32, as torch's own fused SGD of 16 bits is wrong on CPUs."""
    parameters = make_parameters(torch.float16)
    optimizer = SGD(parameters, lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    expected = [p.detach().float() for p in parameters]
    for number in range(3):
        scaler.scale(torch.ones(()))
        for p in parameters:
            p.grad = torch.full_like(p, scaler.get_scale() / 4)
        if number == 1:
            parameters[0].grad[0, 0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
    for p, start in zip(parameters, expected, strict=True):
        wanted = start - 0.5 * 0.25 - 0.5 * 1.9 * 0.25
        torch.testing.assert_close(p.detach().float(), wanted, rtol=2e-3, atol=2e-3)


def test_grad_scaler_without_any_gradient():
    optimizer = SGD(make_parameters(), lr=1.0, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert not optimizer.state


def test_gradients_that_are_not_finite_are_left_out_and_counted():
    """Of all buckets and spans, by one counter; without one they are stepped, as by torch's."""
    infinity, nan = float("inf"), float("nan")
    for name, options in (("SGD", {"momentum": 0.9, "dampening": 0.1}), ("AdamW", {})):
        runs = []
        for counts in (False, True):
            parameters = make_parameters()
            groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
            optimizer = getattr(pyparallel.optim, name)(groups, lr=0.1, **options)
            optimizer.nonfinite = torch.zeros((), dtype=torch.float64) if counts else None
            for number in range(3):
                for p in parameters:
                    p.grad = torch.full_like(p, 0.5)
                if number == 1:
                    parameters[0].grad.flatten()[0] = infinity
                    parameters[2].grad.flatten()[-1] = nan
                optimizer.step()
            runs.append((optimizer, parameters))
        (_, plain), (optimizer, parameters) = runs
        assert optimizer.nonfinite == 2, name
        assert all(p.isfinite().all() for p in parameters), name
        states = chain(*(state.values() for state in optimizer.state.values()))
        assert all(state.isfinite().all() for state in states), name
        for p, other in zip(parameters, plain, strict=True):
            assert torch.equal(p[other.isfinite()], other[other.isfinite()]), name
        assert sum(int(p.isfinite().logical_not().sum()) for p in plain) == 2, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's imports
@pytest.mark.parametrize(
    ("name", "backend"), [("SGD", "inductor"), ("AdamW", "aot_eager"), ("AdamW", "eager")]
)
def test_a_compiled_step(name, backend):
    """The first step lays the parameters out, and the second those of a new group as well."""
    torch._dynamo.reset()
    pairs = both(name, lr=1e-2)
    extra = [nn.Parameter(torch.ones(5)) for _ in pairs]
    optimizer = pairs[0][1]

    @torch.compile(backend=backend)
    def compiled(x):
        optimizer.step()
        return x + 1

    for seed in range(3):
        steps = compiled, lambda _: pairs[1][1].step()
        for (m, each), parameter, step in zip(pairs, extra, steps, strict=True):
            if seed == 1:
                each.add_param_group({"params": [parameter]})
            torch.manual_seed(seed)
            each.zero_grad()
            (m(torch.randn(3, 6)).square().mean() + parameter.square().sum()).backward()
            step(torch.ones(()))
    assert_trained_alike(pairs)
    torch.testing.assert_close(*extra)
    assert not torch.equal(extra[0], torch.ones(5))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's imports
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("backend", "dtype", "atol"),
    [("inductor", torch.float32, 1e-6), ("aot_eager", torch.bfloat16, 4e-3)],
)
def test_a_compiled_training_step(name, backend, dtype, atol):
    """Forward, backward and the step in one function; the first step lays the parameters out."""
    torch._dynamo.reset()
    ends = []
    for compiler in (partial(torch.compile, backend=backend), lambda step: step):
        m = model(dtype)
        options = {**ALL[name], "lr": 1e-2, "master_weights": dtype == torch.bfloat16}
        optimizer = getattr(pyparallel.optim, name)(m.parameters(), **options)

        @compiler
        def step(x, m=m, optimizer=optimizer):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()

        for seed in range(3):
            torch.manual_seed(seed)
            step(torch.randn(4, 6).to(dtype))
        ends.append((m, optimizer))
    assert_trained_alike(ends, rtol=0.0, atol=atol)
    assert not torch.equal(m[0].weight, model(dtype)[0].weight)


def test_distributed_checkpoints_state_dicts():
    for name, options in ALL.items():
        pairs = both(name, lr=1e-2, **options)
        for m, optimizer in pairs:
            train(m, optimizer)
        states = [dcp.get_optimizer_state_dict(m, optimizer) for m, optimizer in pairs]
        assert states[0]["state"].keys() == states[1]["state"].keys()
        fresh = both(name, lr=1.0, **options)
        for (m, optimizer), state, (trained, _) in zip(fresh, reversed(states), pairs, strict=True):
            m.load_state_dict(trained.state_dict())
            dcp.set_optimizer_state_dict(m, optimizer, copy.deepcopy(state))
            train(m, optimizer, seed=1)
        assert_trained_alike(fresh)


@on_ranks(2)
def test_ddp(rank):
    """On two ranks, with gradients that are views of DDP's buckets, and ones that are not."""
    for (name, options), as_view in product(ALL.items(), (False, True)):
        pairs = both(name, lr=1e-2, **options)
        for m, optimizer in pairs:
            wrapped = DistributedDataParallel(m, gradient_as_bucket_view=as_view)
            train(wrapped, optimizer, seed=rank)
        assert_trained_alike(pairs)


@on_ranks(2)
def test_subnet_trainer(rank):
    for name, policy in product(("SGD", "AdamW"), (CarryState(), ResetState())):
        ends = []
        for module in (pyparallel.optim, torch.optim):
            m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
            nn.utils.vector_to_parameters(torch.linspace(-1, 1, 74), m.parameters())
            make = partial(getattr(module, name), lr=1e-2, **ALL[name])
            trainer = SubnetTrainer(m, make, Partition(), 2, optimizer_state=policy)
            train(trainer.subnet, trainer.optimizer, 5, seed=rank)
            trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
            train(trainer.subnet, trainer.optimizer, 2, seed=rank)
            with trainer.full_model():
                flat = [p.detach().flatten() for p in m.parameters()]
                ends.append(torch.cat(flat))
        torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_meta_parameters():
    parameters = [nn.Parameter(torch.zeros(3, device="meta")) for _ in range(2)]
    for cls in (SGD, Adam):
        for p in parameters:
            p.grad = torch.zeros(3, device="meta")
        cls(parameters).step()
    assert all(p.is_meta for p in parameters)
