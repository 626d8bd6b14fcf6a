"""Both halves of a backward: bitwise the gradients, and the work, of the whole."""

import copy
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pyparallel.pipeline.runtime.split_backward import backward_input


class WorkCounter(TorchDispatchMode):
    """Counts matrix products, and the gradients that backward kernels compute."""

    def __init__(self):
        super().__init__()
        self.done = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"mm", "bmm", "addmm", "baddbmm"} or name.endswith("_backward"):
            masks = [each for each in args if isinstance(each, list | tuple) and _is_mask(each)]
            self.done[name] += sum(masks[-1]) if masks else 1
        return func(*args, **(kwargs or {}))


def _is_mask(value):
    return len(value) > 1 and all(isinstance(each, bool) for each in value)


def count(function):
    with WorkCounter() as counter:
        result = function()
    return result, counter.done


class Doubled(torch.autograd.Function):
    """2 x w, with a backward that always computes both gradients."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * (x @ w)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return 2 * (gradient @ w.t()), 2 * (x.flatten(0, -2).t() @ gradient.flatten(0, -2))


class Plus(torch.autograd.Function):
    """x + w, which returns its output gradient for both inputs."""

    @staticmethod
    def forward(ctx, x, w):
        return x + w

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient


class Stage(nn.Module):
    """A module that computes a given function of its parameters."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.inner = nn.ModuleList(modules)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def wrap(*modules):
    """Return a stage around modules that return a tuple."""
    return Stage(lambda s, x: s.inner[1](s.inner[0](x)[0]) @ s.w, *modules)


def attend(stage, x, y):
    return stage.inner[0](x, y, y, need_weights=False)[0], y @ stage.w


def pool(stage, x):
    """Attend with learned queries: one kernel computes the gradients of all three."""
    return scaled_dot_product_attention((stage.w @ stage.inner[0].weight)[None], x, x @ stage.w)


def recompute(stage, x):
    return checkpoint(stage.inner[0], x, use_reentrant=False)


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))
SHARED = nn.Linear(8, 8)
MODULES = {
    "mlp": nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU()))),
    "in place": nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
    "matmul": Stage(lambda s, x: (x @ s.w).relu() @ s.frozen + s.b),
    "residual": Stage(lambda s, x: x + s.inner[0](x + x @ s.w), nn.LayerNorm(8)),
    "block": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True),
    "attention": nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "convolution": nn.Sequential(nn.Conv1d(5, 4, 3), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 1)),
    "batch norm": nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.PReLU(), nn.Flatten()),
    "lstm": wrap(nn.LSTM(8, 8), nn.Linear(8, 8)),
    "gru": wrap(nn.GRU(8, 8), nn.Linear(8, 8)),
    "shared": nn.Sequential(SHARED, nn.GELU(), SHARED, nn.LayerNorm(8), nn.Linear(8, 3)),
    "shared side by side": Stage(lambda s, x: torch.cat([x[:1] @ s.w, x[1:] @ s.w]) + s.b),
    "shared with a product": Stage(lambda s, x: (x @ (s.w @ s.w.t())) * s.b + (x * s.b) @ s.w),
    "several outputs": Stage(lambda s, x: (x @ s.w, s.b * 2, x.detach(), s.w, x, x * 2)),
    "an output twice": Stage(lambda s, x: (s.b * 2,) * 2 + (x @ s.w,) * 2),
    "pieces": Stage(lambda s, x: torch.stack([p * s.b for p in (x @ s.w).unbind(1)])),
    "one piece unused": Stage(lambda s, x: (x @ s.w).chunk(2, dim=0)[1] * s.b),
    "written in Python": Stage(lambda s, x: Doubled.apply(x @ s.inner[0].weight, s.w), SHARED),
    "learned queries": Stage(pool, nn.Linear(8, 8)),
    "no parameters": nn.Sequential(nn.ReLU(), nn.Flatten()),
    "all frozen": nn.Sequential(nn.Linear(8, 8), nn.ReLU()).requires_grad_(False),
    "checkpoint": Stage(recompute, nn.Linear(8, 8)),
}  # fmt: skip
FROZEN_END = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh(), nn.Tanh())
TWO_INPUTS = {
    "cross attention": Stage(attend, nn.MultiheadAttention(8, 2, batch_first=True)),
    "bilinear": nn.Bilinear(8, 8, 3),
    "one unused": Stage(lambda s, x, y: y @ s.w),
}


def forward(module, *inputs):
    """Return outputs, a gradient for each, and inputs as leaves; (x, False): no gradient."""
    torch.manual_seed(1)
    pairs = [x if isinstance(x, tuple) else (x, True) for x in inputs]
    leaves = [x.clone().requires_grad_(wanted) for x, wanted in pairs]
    outputs = module(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs, [torch.randn_like(each) for each in outputs], leaves


def plain(module, *inputs):
    outputs, gradients, leaves = forward(module, *inputs)
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    _, work = count(lambda: torch.autograd.backward(*zip(*pairs, strict=True)))
    return [x.grad for x in leaves], work


def split(module, *inputs):
    outputs, gradients, leaves = forward(module, *inputs)
    (found, weights), first = count(partial(backward_input, outputs, gradients, leaves))
    assert all(x.grad is None for x in leaves)
    _, second = count(weights.run)
    return list(found), first, second


def assert_equal(ours, theirs):
    assert [x is None for x in ours] == [x is None for x in theirs]
    for x, y in zip(ours, theirs, strict=True):
        assert x is None or torch.equal(x, y)


def gradients_of(module):
    return [parameter.grad for parameter in module.parameters()]


def compare(module, *inputs, prepare=lambda module: None):
    """Compare both ways twice, so that the second run accumulates."""
    other = copy.deepcopy(module)
    prepare(module)
    prepare(other)
    for _ in range(2):
        theirs, whole = plain(other, *inputs)
        ours, first, second = split(module, *inputs)
        assert_equal(ours, theirs)
        assert_equal(gradients_of(module), gradients_of(other))
    return whole, first, second


def test_both_halves_give_the_gradients_and_do_the_work_of_one_backward(subtests):
    for name, module in MODULES.items():
        with subtests.test(name=name):
            whole, first, second = compare(copy.deepcopy(module), X)
            if name != "checkpoint":
                assert first + second == whole


def test_two_inputs_of_which_one_may_need_no_gradient(subtests):
    for name, module in TWO_INPUTS.items():
        for wanted in [(True, True), (True, False), (False, True)]:
            with subtests.test(name=name, wanted=wanted):
                inputs = [(X, wanted[0]), (X + 1, wanted[1])]
                whole, first, second = compare(copy.deepcopy(module), *inputs)
                assert first + second == whole


def test_the_parameters_are_deferred_to_the_second_half():
    module = copy.deepcopy(MODULES["mlp"])
    outputs, gradients, leaves = forward(module, X)
    (found, weights), first = count(lambda: backward_input(outputs, gradients, leaves))
    assert found[0] is not None
    assert gradients_of(module) == [None] * 8
    _, second = count(weights.run)
    assert (first["mm"], second["mm"]) == (4, 4)
    assert None not in gradients_of(module)


def test_everything_is_deferred_on_a_first_stage():
    module = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    whole, first, second = compare(module, (torch.arange(9).view(3, 3), False))
    assert (sum(first.values()), second) == (0, whole)
    outputs = module(torch.arange(9))
    found, weights = backward_input([outputs], [torch.ones_like(outputs)], [None])
    assert found == (None,)
    before = module[2].bias.grad.clone()
    weights.run()
    assert torch.equal(module[2].bias.grad, before + 9)


def test_without_output_gradients_nothing_is_computed():
    module = copy.deepcopy(MODULES["mlp"])
    outputs, _, leaves = forward(module, X)
    for none in ([outputs, [None]], [[X], [X]], [[], []]):
        found, weights = backward_input(*none, leaves)
        weights.run()
        assert (found, gradients_of(module)) == ((None,), [None] * 8)


def test_an_output_without_a_gradient_is_skipped():
    module = Stage(lambda s, x: (x @ s.w, x * s.b))
    outputs, gradients, leaves = forward(module, X)
    found, weights = backward_input(outputs, [None, gradients[1]], leaves)
    weights.run()
    assert torch.equal(found[0], gradients[1] * module.b)
    assert module.w.grad is None
    assert torch.equal(module.b.grad, (gradients[1] * X).sum((0, 1)))


def test_gradients_are_accumulated_in_place():
    for name in ("mlp", "shared", "written in Python"):
        module = copy.deepcopy(MODULES[name])
        flat = torch.zeros(sum(p.numel() for p in module.parameters()))
        sizes = [parameter.numel() for parameter in module.parameters()]
        for parameter, piece in zip(module.parameters(), flat.split(sizes), strict=True):
            parameter.grad = piece.view_as(parameter) if parameter.requires_grad else None
        split(module, X)
        other = copy.deepcopy(MODULES[name])
        plain(other, X)
        theirs = [torch.zeros_like(p) if p.grad is None else p.grad for p in other.parameters()]
        assert torch.equal(flat, torch.cat([each.flatten() for each in theirs]))


def test_a_stored_gradient_is_not_the_callers_tensor():
    module = Stage(lambda s, x: Plus.apply(x, s.w))
    outputs, gradients, leaves = forward(module, X[:1, :1].expand(1, 8, 8)[0])
    _, weights = backward_input(outputs, gradients, leaves)
    weights.run()
    gradient = gradients[0].clone()
    gradients[0].zero_()
    assert torch.equal(module.w.grad, gradient)


def test_hooks_change_a_gradient_once(subtests):
    for name in ["mlp", "block", "shared", "written in Python"]:
        with subtests.test(name=name):
            compare(copy.deepcopy(MODULES[name]), X, prepare=change_gradients)


def change_gradients(module):
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.register_hook(lambda gradient: 3 * gradient)
            layer.register_forward_hook(double_the_gradient)


def double_the_gradient(layer, inputs, output):
    output.register_hook(lambda gradient: 2 * gradient)


class Swapped(saved_tensors_hooks):
    """Packs weights as their index and unpacks other weights, as StageWeights does."""

    def __init__(self, module, others):
        self.storages = [p.untyped_storage().data_ptr() for p in module.parameters()]
        self.others = [p.detach() for p in others.parameters()]
        self.unpacked = set()
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self.storages:
            return tensor
        return self.storages.index(storage), tensor.size(), tensor.stride()

    def unpack(self, packed):
        if not isinstance(packed, tuple):
            return packed
        self.unpacked.add(packed[0])
        return self.others[packed[0]].as_strided(*packed[1:])


def test_hooks_on_saved_tensors_work_in_both_halves():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Stage(lambda s, x: x @ s.w), nn.LayerNorm(8))
    other, newer = copy.deepcopy(module), copy.deepcopy(module)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.add_(1)
    with (swapped := Swapped(module, newer)):
        outputs, gradients, leaves = forward(module, X)
    (found,), weights = backward_input(outputs, gradients, leaves)
    # The weights that the products and the norm saved: all were unpacked.
    assert swapped.unpacked == {0, 2, 5, 6}
    swapped.unpacked.clear()
    weights.run()
    assert swapped.unpacked == {0, 2, 5, 6}
    with Swapped(other, newer):
        outputs, gradients, leaves = forward(other, X)
    torch.autograd.backward(outputs, gradients)
    assert_equal([found, *gradients_of(module)], [leaves[0].grad, *gradients_of(other)])
    assert not torch.equal(found, plain(copy.deepcopy(module), X)[0][0])


class Watched(saved_tensors_hooks):
    """Tracks which saved tensors autograd still holds."""

    def __init__(self):
        self.boxes = []
        super().__init__(self.pack, lambda box: box[0])

    def pack(self, tensor):
        box = Box([tensor.detach()])
        self.boxes.append(weakref.ref(box))
        return box

    @property
    def alive(self):
        return [box()[0].shape for box in self.boxes if box() is not None]


class Box(list):
    """A list with weak references."""


def test_saved_tensors_are_freed_by_the_second_half(subtests):
    for name in [*MODULES, "frozen end"]:
        with subtests.test(name=name):
            with (watched := Watched()):
                outputs, gradients, leaves = forward(
                    copy.deepcopy(MODULES.get(name, FROZEN_END)), X
                )
            before = len(watched.alive)
            _, weights = backward_input(outputs, gradients, leaves)
            del outputs
            if name == "frozen end":
                # Nothing between the outputs and the last parameter is held for the second half.
                assert (before, len(watched.alive)) == (5, 2)
            weights.run()
            assert watched.alive == []


def test_tensors_saved_for_parameters_are_freed_while_the_outputs_live():
    module = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh())
    with (watched := Watched()):
        outputs, gradients, leaves = forward(module, X)
    _, weights = backward_input(outputs, gradients, leaves)
    assert (3, 5, 8) in watched.alive or (15, 8) in watched.alive
    weights.run()
    assert watched.alive == [(3, 5, 7), (3, 5, 6)]
    del outputs
    assert watched.alive == []


def test_a_second_run_is_refused():
    outputs, gradients, leaves = forward(copy.deepcopy(MODULES["mlp"]), X)
    _, weights = backward_input(outputs, gradients, leaves)
    weights.run()
    with pytest.raises(RuntimeError, match=r"^run must be called once after each backward_input"):
        weights.run()


def test_a_graph_deeper_than_the_python_stack():
    w = torch.ones(1, requires_grad=True)
    x = y = torch.ones(1, requires_grad=True)
    for _ in range(3000):
        y = y + 0
    (found,), weights = backward_input([y * w], [torch.ones(1)], [x])
    weights.run()
    assert (found, w.grad) == (1, 1)


def test_a_compiled_stage_is_computed_in_the_first_half():
    module = copy.deepcopy(MODULES["mlp"])
    compiled = torch.compile(module, backend="aot_eager")
    outputs, gradients, leaves = forward(compiled, X)
    (found, weights), first = count(lambda: backward_input(outputs, gradients, leaves))
    _, second = count(weights.run)
    assert (first["mm"], second["mm"]) == (8, 0)
    other = copy.deepcopy(MODULES["mlp"])
    assert_equal(found, plain(other, X)[0])
    assert_equal(gradients_of(module), gradients_of(other))


OPERATIONS = [
    lambda s, a, b: a + b,
    lambda s, a, b: a * b.sigmoid(),
    lambda s, a, b: a @ s.w,
    lambda s, a, b: linear(a, s.w, s.b),
    lambda s, a, b: layer_norm(a, (8,), s.b, s.v),
    lambda s, a, b: a @ (s.w @ s.frozen),
    lambda s, a, b: a @ s.v.outer(s.b),
    lambda s, a, b: Doubled.apply(a, s.u),
    lambda s, a, b: torch.cat([a[:3], b[3:]]).tanh(),
    lambda s, a, b: s.v + s.w,
    lambda s, a, b: scaled_dot_product_attention(a[None], b[None], s.u[None])[0],
    lambda s, a, b: (a.detach() @ s.u).relu(),
]


class Drawn(nn.Module):
    """A random graph: each step takes two of the values so far."""

    def __init__(self, steps, num_outputs):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.u, self.frozen = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.v, self.b = (nn.Parameter(torch.randn(8)) for _ in range(2))
        self.frozen.requires_grad_(False)
        self.steps, self.num_outputs = steps, num_outputs

    def forward(self, *inputs):
        values = list(inputs)
        for operation, first, second in self.steps:
            a, b = values[first % len(values)], values[-1 - second % len(values)]
            values.append(OPERATIONS[operation](self, a, b))
        return tuple(values[-self.num_outputs :])


SQUARE = X.flatten()[:64].view(8, 8)
STEP = st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=9), st.integers(1, 3), st.booleans(), st.booleans())
def test_any_graph(steps, num_outputs, first_wanted, second_wanted):
    inputs = [(SQUARE, first_wanted), (SQUARE.t(), second_wanted)]
    module = Drawn(steps, num_outputs)
    other = copy.deepcopy(module)
    if not any(output.requires_grad for output in forward(module, *inputs)[0]):
        return
    theirs, whole = plain(other, *inputs)
    ours, first, second = split(module, *inputs)
    assert first + second == whole
    assert_equal([*ours, *gradients_of(module)], [*theirs, *gradients_of(other)])
