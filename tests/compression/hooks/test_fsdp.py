"""The compression of FSDP2's gradients and parameters, on one, three and four ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pyparallel.comm import DisagreementError
from pyparallel.compression import (
    Cast,
    CorruptMessageError,
    ErrorFeedback,
    Int8,
    NonFiniteError,
    TopK,
    compress_fsdp,
    fsdp_all_gather,
    fsdp_reduce_scatter,
)
from tests.compression.hooks.steps import (
    CorruptScale,
    average,
    backward,
    batches,
    check_nan,
    each_policy,
    flat_gradients,
    gradients_of,
)
from tests.workers import assert_equal_on_all_ranks, call_each

pytestmark = pytest.mark.slow  # 9 seconds

SHAPE = 4, 5, 7  # of a batch
SPARSE = ErrorFeedback(TopK(0.1))


class Block(nn.Module):
    """Attention and an MLP, of sizes not divisible by blocks of 256."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 50), nn.GELU(), nn.Linear(50, width))

    def forward(self, x):
        y = self.norm(x)
        return self.mlp(x + self.attention(y, y, y, need_weights=False)[0])


def build(mesh=None, dtype=torch.float32, width=36, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, width), Block(width), nn.Linear(width, 3)).to(dtype)
    for module in (model[1], model):
        fully_shard(module, mesh=mesh, **options)
    return model


def relative(got, truth):
    return float((got - truth).norm() / truth.norm())


def mean_residual_norm(state):
    """Return the norm of the mean residual over ranks."""
    parts = [
        average(tensors["residual"]).norm()
        for _, saved in sorted(state.state_dict()["gradients"].items())
        for _, tensors in sorted(saved["parameters"].items())
    ]
    return torch.stack(parts).norm()


def compare_with_plain(rank, compressor, dtype, options, error, share):
    plain, model = build(dtype=dtype, **options), build(dtype=dtype, **options)
    state = compress_fsdp(model, gradients=compressor)
    expected = 0
    for batch in batches(rank, 2, *SHAPE, dtype=dtype):
        truth, got = gradients_of(plain, batch), gradients_of(model, batch)
        assert relative(got, truth) < error
        expected = expected + truth - got
        if isinstance(compressor, ErrorFeedback):  # the residuals hold the error
            assert abs(mean_residual_norm(state) - expected.norm()) < 2e-5 * truth.norm()
    dense_bytes = len(expected) * torch.finfo(dtype).bits / 8
    assert state.last_step.payload_bytes < share * dense_bytes
    assert_equal_on_all_ranks(got.tolist())


HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
PLAIN_CASES = [  # compressor, dtype, options, largest error of a step, share of the bytes
    (Cast(), torch.float32, {}, 4e-3, 0.55),
    (Cast(), torch.bfloat16, {}, 1e-2, 1.1),
    (Int8(), torch.float32, HALF, 3e-2, 0.35),
    (ErrorFeedback(Int8()), torch.float32, {}, 5e-2, 0.35),
    (SPARSE, torch.float32, {}, 1.1, 0.25),
    (TopK(1.0), torch.float32, {}, 1e-6, 2.1),
]


def reduce_with_every_op(rank):
    """Reduce with SUM, AVG and PREMUL_SUM, without loss."""
    size = dist.get_world_size()
    ops = [
        (dist.ReduceOp.SUM, 1),
        (dist.ReduceOp.AVG, 1 / size),
        (dist._make_nccl_premul_sum(0.25), 0.25),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        comm = fsdp_reduce_scatter(TopK(1.0))
        for op, factor in ops:
            x = torch.arange(size * 5.0).to(dtype) * (rank + 1)
            out = comm.allocate((5,), dtype=dtype, device=x.device)
            assert comm(out, x, dist.group.WORLD, op) is None
            weight = factor * size * (size + 1) / 2
            assert torch.equal(out, (torch.arange(size * 5.0) * weight)[rank * 5 :][:5].to(dtype))


def be_alone(rank):
    """FSDP2 calls no collective in a group of one rank."""
    plain, model = build(), build()
    state = compress_fsdp(model, gradients=Int8(), parameters=Int8())
    batch = batches(rank, 1, *SHAPE)[0]
    assert torch.equal(gradients_of(model, batch), gradients_of(plain, batch))
    assert state.last_step.payload_bytes == 0
    reduce_with_every_op(rank)


def unsharded(model):
    """Return each module's parameters as seen by forward."""
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, *_, name=name: seen.update({name: module.weight.detach().clone()})
            )
    return seen


def gather_parameters(rank, compressor, dtype, options, error):
    plain, model = build(dtype=dtype, **options), build(dtype=dtype, **options)
    state = compress_fsdp(model, parameters=compressor)
    seen, truth = unsharded(model), unsharded(plain)
    (batch,) = batches(rank, 1, *SHAPE, dtype=dtype)
    assert relative(gradients_of(model, batch), gradients_of(plain, batch)) < 10 * error
    assert all(relative(seen[name], truth[name]) < error for name in truth)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    assert state.last_step.payload_bytes > 0
    assert_equal_on_all_ranks({name: weight.float().tolist() for name, weight in seen.items()})


GATHER_CASES = [  # compressor, dtype, options, largest error of a weight
    (Int8(), torch.float32, {}, 1e-2),
    (Int8(seed=1), torch.float32, {"reshard_after_forward": False}, 2e-2),
    (Cast(), torch.float32, HALF, 1e-9),
    (TopK(1.0), torch.bfloat16, {}, 1e-9),
]


def train(model, given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in given:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    return [p.to_local().clone() for p in model.parameters()]


def compress(model, gradients):
    return compress_fsdp(model, gradients=gradients, parameters=Int8(seed=2))


def resume(rank):
    """A run resumes bit for bit; states of other models and compressors are refused."""
    for compressor in (ErrorFeedback(Int8()), SPARSE):
        whole = build()
        compress(whole, compressor)
        expected = train(whole, batches(rank, 4, *SHAPE))
        first, second = build(), build()
        state = compress(first, compressor)
        train(first, batches(rank, 4, *SHAPE)[:2])
        weights, saved = copy.deepcopy(first.state_dict()), copy.deepcopy(state.state_dict())
        assert state.residual_norm > 0
        resumed = compress(second, compressor)
        second.load_state_dict(weights)
        resumed.load_state_dict(saved)
        assert all(map(torch.equal, train(second, batches(rank, 4, *SHAPE)[2:]), expected))
    refuse_states_of_others(rank, saved)


def refuse_states_of_others(rank, saved):
    state = compress(build(), SPARSE)
    lacking = {**saved, "gradients": {"": saved["gradients"][""]}}
    with pytest.raises(ValueError, match=r"of the modules \['', '1'\], got one of \[''\]"):
        state.load_state_dict(lacking)
    with pytest.raises(ValueError, match="must have been saved with compressor Cast"):
        compress(build(), Cast()).load_state_dict(saved)
    damaged = copy.deepcopy(saved)
    if rank == 1:
        next(iter(damaged["gradients"]["1"]["parameters"].values()))["residual"].add_(1)
    with pytest.raises(DisagreementError, match="rank 1: the tensor parameters"):
        state.load_state_dict(damaged)
    model = build(width=40)
    compress(model, SPARSE).load_state_dict(saved)
    with pytest.raises(ValueError, match="state must be of this model, got a residual of shape"):
        train(model, batches(rank, 1, *SHAPE))


def accumulate(rank):
    """Without a sync no gradients are sent; with it, the sum is compressed once."""
    plain, model = build(), build()
    state = compress_fsdp(model, gradients=Cast())
    first, second = batches(rank, 2, *SHAPE)
    for each in (plain, model):
        each.set_requires_gradient_sync(False)
        backward(each, first)
        assert state.last_step.payload_bytes == 0
        each.set_requires_gradient_sync(True)
        backward(each, second)
    assert relative(flat_gradients(model), flat_gradients(plain)) < 4e-3


def hybrid(rank):
    """Two replicas of two shards each; gradients are compressed within each replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    plain, model = build(mesh), build(mesh)
    compress_fsdp(model, gradients=ErrorFeedback(Int8()), parameters=Cast())
    batch = batches(rank, 1, *SHAPE)[0]
    assert 0 < relative(gradients_of(model, batch), gradients_of(plain, batch)) < 5e-2


def subgroup(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))["shard"]
    plain, model = build(mesh), build(mesh)
    compress_fsdp(model, gradients=TopK(1.0), process_group=mesh.get_group())
    batch = batches(rank, 1, *SHAPE)[0]
    assert relative(gradients_of(model, batch), gradients_of(plain, batch)) < 1e-6


def serve_or_refuse(rank):
    """Check supported settings, and those rejected at once on all ranks."""
    reduce_with_every_op(rank)
    model = build()
    with pytest.raises(DisagreementError, match="modules that fully_shard was applied to"):
        compress_fsdp(nn.Linear(2, 2), gradients=Int8())
    with pytest.raises(DisagreementError, match="must not have error feedback for the al"):
        compress_fsdp(model, parameters=ErrorFeedback(Int8()))
    with pytest.raises(DisagreementError, match=r"same gradients, got Int8.* and Cast.*rank 1"):
        compress_fsdp(model, gradients=[Int8(), Cast(), Int8()][rank])
    sentence = r"^ranks 0-2: gradients must be an object such as Int8\(\).*the class TopK; create"
    with pytest.raises(TypeError, match=sentence):
        compress_fsdp(model, gradients=TopK)
    state = compress_fsdp(model, gradients=Int8())
    with pytest.raises(ValueError, match="with gradients and parameters, got"):
        state.load_state_dict({})
    with pytest.raises(
        DisagreementError, match="model must not be compressed already, got one whose"
    ):
        compress_fsdp(model, parameters=Int8())
    with pytest.raises(ValueError, match="must not have error feedback"):
        fsdp_all_gather(ErrorFeedback(Int8()))
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"op must be SUM, AVG or PREMUL_SUM, got .*MAX"):
        fsdp_reduce_scatter(Int8())(x[:2], x, dist.group.WORLD, dist.ReduceOp.MAX)
    for dtype in (torch.uint8, torch.float64):
        with pytest.raises(ValueError, match=f"float16 only, got {dtype}"):
            fsdp_all_gather(Int8())(x.to(dtype), x[:2].to(dtype), dist.group.WORLD)


class CorruptIndex(TopK):
    """A TopK with invalid indices in rank 0's part of rank 1's message."""

    def compress(self, x, state, residual=None):
        values, indices = super().compress(x, state, residual)
        wrong = state.rank == 1 and state.step == 2 and "[1]" not in state.layout.names[0]
        return values, indices + x.numel() if wrong else indices


def send_garbage(rank):
    for options in (
        {"gradients": CorruptScale()},
        {"gradients": ErrorFeedback(CorruptIndex(0.1))},
        {"parameters": CorruptScale()},
    ):
        model = build()
        compress_fsdp(model, **options)
        with pytest.raises(CorruptMessageError, match="got a corrupt one from rank 1"):
            train(model, batches(rank, 3, *SHAPE))


def meet_nan(rank, compressor, policy):
    def start(nonfinite):
        model = build()
        return model, compress_fsdp(model, gradients=compressor, nonfinite=nonfinite)

    check_nan(rank, start, batches(rank, 3, *SHAPE), policy, "from rank 1 in ")


def overflow_gradient_of(model, name):
    module, _, leaf = name.rpartition(".")

    def hook(module, _):  # in forward the module has the unsharded parameter
        getattr(module, leaf).register_hook(lambda gradient: gradient * float("inf"))

    model.get_submodule(module).register_forward_pre_hook(hook)


def name_what_is_not_finite(rank):
    """One weight of a rank is the only one whose gradient has an inf."""
    for name in ("0.weight", "1.mlp.2.bias", "2.weight"):
        model = build()
        compress_fsdp(model, gradients=Int8())
        if rank == 2:
            overflow_gradient_of(model, name)
        with pytest.raises(NonFiniteError, match=f"from rank 2 in {name}: "):
            backward(model, batches(rank, 1, *SHAPE)[0])


def test_gradients_are_those_of_plain_fsdp(ranks):
    ranks.run_each(3, compare_with_plain, PLAIN_CASES)


def test_all_ranks_compute_with_the_same_parameters(ranks):
    ranks.run_each(3, gather_parameters, GATHER_CASES)


@each_policy([ErrorFeedback(Int8()), SPARSE, Cast()])
def test_a_nan_ends_the_step_on_all_ranks_or_counts_as_zeros_or_is_seen(ranks, rows):
    ranks.run_each(3, meet_nan, rows)


CASES = {
    1: [be_alone],
    3: [resume, serve_or_refuse, send_garbage, name_what_is_not_finite, accumulate],
    4: [hybrid, subgroup],
}


@pytest.mark.parametrize("num_ranks", CASES)
def test_cases(ranks, num_ranks):
    ranks.run(num_ranks, call_each, [(case,) for case in CASES[num_ranks]])
