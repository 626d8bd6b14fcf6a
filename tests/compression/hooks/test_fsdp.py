import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves

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
from tests.workers import run_ranks

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


def batches(rank, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 5, 7, generator=generator).to(dtype) for _ in range(count)]


def backward(model, batch):
    model(batch).square().mean().backward()


def gradients_of(model, batch):
    model.zero_grad()
    backward(model, batch)
    return flat_gradients(model)


def flat_gradients(model):
    return torch.cat([p.grad.full_tensor().flatten().float() for p in model.parameters()])


def relative(got, truth):
    return float((got - truth).norm() / truth.norm())


def average(tensor, group=None):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def mean_residual_norm(state):
    """Return the norm of the mean residual over ranks."""
    parts = [
        average(tensors["residual"]).norm()
        for _, saved in sorted(state.state_dict()["gradients"].items())
        for _, tensors in sorted(saved["parameters"].items())
    ]
    return torch.stack(parts).norm()


def compare_with_plain(rank, cases):
    found = {}
    for case, (compressor, dtype, options) in cases.items():
        plain, model = build(dtype=dtype, **options), build(dtype=dtype, **options)
        state = compress_fsdp(model, gradients=compressor)
        errors, residual_errors, expected = [], [], 0
        for batch in batches(rank, 2, dtype):
            truth, got = gradients_of(plain, batch), gradients_of(model, batch)
            errors.append(relative(got, truth))
            expected = expected + truth - got
            if isinstance(compressor, ErrorFeedback):
                residual_errors.append(
                    float(abs(mean_residual_norm(state) - expected.norm()) / truth.norm())
                )
        share = state.last_step.payload_bytes / (len(expected) * torch.finfo(dtype).bits / 8)
        found[case] = max(errors), max(residual_errors, default=0.0), share, got.tolist()
    return found


HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
PLAIN_CASES = {  # compressor, dtype, options: maximum error, and share of the bytes
    "Cast": (Cast(), torch.float32, {}, 4e-3, 0.55),
    "Cast of bfloat16": (Cast(), torch.bfloat16, {}, 1e-2, 1.1),
    "Int8, bfloat16 on the way": (Int8(), torch.float32, HALF, 3e-2, 0.35),
    "ErrorFeedback(Int8)": (ErrorFeedback(Int8()), torch.float32, {}, 5e-2, 0.35),
    "ErrorFeedback(TopK)": (SPARSE, torch.float32, {}, 1.1, 0.25),
    "TopK of all": (TopK(1.0), torch.float32, {}, 1e-6, 2.1),
}


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
    return True


def be_alone(rank):
    """FSDP2 calls no collective in a group of one rank."""
    plain, model = build(), build()
    state = compress_fsdp(model, gradients=Int8(), parameters=Int8())
    batch = batches(rank, 1)[0]
    same = torch.equal(gradients_of(model, batch), gradients_of(plain, batch))
    return same, state.last_step.payload_bytes, reduce_with_every_op(rank)


def test_one_rank_alone():
    assert run_ranks(1, be_alone) == [(True, 0, True)]


def unsharded(model):
    """Return each module's parameters as seen by forward."""
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, *_, name=name: seen.update({name: module.weight.detach().clone()})
            )
    return seen


def gather_parameters(rank, cases):
    found = {}
    for case, (compressor, dtype, options) in cases.items():
        plain, model = build(dtype=dtype, **options), build(dtype=dtype, **options)
        state = compress_fsdp(model, parameters=compressor)
        seen, truth = unsharded(model), unsharded(plain)
        batch = batches(rank, 1, dtype)[0]
        grads = relative(gradients_of(model, batch), gradients_of(plain, batch))
        error = max(relative(seen[name], truth[name]) for name in truth)
        kept = all(
            torch.equal(mine.to_local(), theirs.to_local())
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)
        )
        bits = {name: weight.float().tolist() for name, weight in seen.items()}
        found[case] = error, grads, kept, state.last_step.payload_bytes > 0, bits
    return found


GATHER_CASES = {
    "Int8": (Int8(), torch.float32, {}, 1e-2),
    "Int8 with draws": (Int8(seed=1), torch.float32, {"reshard_after_forward": False}, 2e-2),
    "Cast of bfloat16": (Cast(), torch.float32, HALF, 1e-9),
    "TopK of all": (TopK(1.0), torch.bfloat16, {}, 1e-9),
}


def train(model, given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in given:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    return [p.to_local().clone() for p in model.parameters()]


def compress(model, gradients):
    return compress_fsdp(model, gradients=gradients, parameters=Int8(seed=2))


def resume(rank, compressors):
    """Return by compressor whether a run resumes bit for bit; check errors for another model."""
    found = {}
    for compressor in compressors:
        whole = build()
        compress(whole, compressor)
        expected = train(whole, batches(rank, 4))
        first, second = build(), build()
        state = compress(first, compressor)
        train(first, batches(rank, 4)[:2])
        weights, saved = copy.deepcopy(first.state_dict()), copy.deepcopy(state.state_dict())
        assert state.residual_norm > 0
        resumed = compress(second, compressor)
        second.load_state_dict(weights)
        resumed.load_state_dict(saved)
        got = train(second, batches(rank, 4)[2:])
        found[repr(compressor)] = all(map(torch.equal, got, expected))
    return found, states_of_others(rank, saved)


def states_of_others(rank, saved):
    """Return how many states of other models and compressors are rejected."""
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
        train(model, batches(rank, 1))
    return 3


def accumulate(rank):
    """Without a sync no gradients are sent; with it, the sum is compressed once."""
    plain, model = build(), build()
    state = compress_fsdp(model, gradients=Cast())
    first, second = batches(rank, 2)
    for each in (plain, model):
        each.set_requires_gradient_sync(False)
        backward(each, first)
        silent = state.last_step.payload_bytes
        each.set_requires_gradient_sync(True)
        backward(each, second)
    return silent, relative(flat_gradients(model), flat_gradients(plain))


def hybrid(rank):
    """Two replicas of two shards each; gradients are compressed within each replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    plain, model = build(mesh), build(mesh)
    compress_fsdp(model, gradients=ErrorFeedback(Int8()), parameters=Cast())
    batch = batches(rank, 1)[0]
    return relative(gradients_of(model, batch), gradients_of(plain, batch))


def subgroup(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))["shard"]
    plain, model = build(mesh), build(mesh)
    compress_fsdp(model, gradients=TopK(1.0), process_group=mesh.get_group())
    batch = batches(rank, 1)[0]
    return relative(gradients_of(model, batch), gradients_of(plain, batch))


def four_ranks(rank):
    return accumulate(rank), hybrid(rank), subgroup(rank)


def test_accumulation_replicas_and_subgroups():
    for (silent, accumulated), copies, part in run_ranks(4, four_ranks):
        assert silent == 0
        assert accumulated < 4e-3
        assert 0 < copies < 5e-2
        assert part < 1e-6


def serve_or_refuse(rank):
    """Check supported settings, and those rejected at once on all ranks."""
    assert reduce_with_every_op(rank)
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
    return True


class CorruptScale(Int8):
    """An Int8 whose second message on rank 1 has an invalid scale."""

    def compress(self, x, state, residual=None):
        codes, scales = super().compress(x, state, residual)
        return codes, scales - 1e9 if state.rank == 1 and state.step == 2 else scales


class CorruptIndex(TopK):
    """A TopK with invalid indices in rank 0's part of rank 1's message."""

    def compress(self, x, state, residual=None):
        values, indices = super().compress(x, state, residual)
        wrong = state.rank == 1 and state.step == 2 and "[1]" not in state.layout.names[0]
        return values, indices + x.numel() if wrong else indices


def send_garbage(rank, given):
    messages = []
    for options in given:
        model = build()
        compress_fsdp(model, **options)
        with pytest.raises(CorruptMessageError) as raised:
            train(model, batches(rank, 3))
        messages.append(str(raised.value))
    return messages


def poison(rank, compressors):
    """A step with a nan on rank 1, by policy, and the same steps without what it must not leave."""
    return [
        {policy: meet_nan(rank, compressor, policy) for policy in ("raise", "skip", "allow")}
        for compressor in compressors
    ]


def meet_nan(rank, compressor, policy):
    good, bad, later = batches(rank, 3)
    model, twin = build(), build()
    state = compress_fsdp(model, gradients=compressor, nonfinite=policy)
    compress_fsdp(twin, gradients=compressor, nonfinite="allow")
    for each in (model, twin):
        gradients_of(each, good)
    factor = float("nan") if rank == 1 else 1.0
    model.zero_grad()
    loss = model(bad).square().mean() * factor
    if policy == "raise":
        before = copy.deepcopy(state.state_dict())
        with pytest.raises(NonFiniteError) as raised:
            loss.backward()
        for left, right in zip(
            *map(tree_leaves, (copy.deepcopy(state.state_dict()), before)), strict=True
        ):
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        expected, found = gradients_of(twin, later), gradients_of(model, later)
        return str(raised.value), torch.equal(expected, found)
    loss.backward()
    seen = flat_gradients(model)
    if policy == "skip":
        twin.zero_grad()
        (twin(bad).square().mean() * (0.0 if rank == 1 else 1.0)).backward()
        return torch.equal(seen, flat_gradients(twin))
    norm = state.residual_norm
    return bool(seen.isnan().any()), norm, bool(gradients_of(model, later).isfinite().all())


def overflow_gradient_of(model, name):
    module, _, leaf = name.rpartition(".")

    def hook(module, _):  # in forward the module has the unsharded parameter
        getattr(module, leaf).register_hook(lambda gradient: gradient * float("inf"))

    model.get_submodule(module).register_forward_pre_hook(hook)


def name_what_is_not_finite(rank):
    """One weight of a rank is the only one whose gradient has an inf."""
    found = []
    for name in ("0.weight", "1.mlp.2.bias", "2.weight"):
        model = build()
        compress_fsdp(model, gradients=Int8())
        if rank == 2:
            overflow_gradient_of(model, name)
        with pytest.raises(NonFiniteError) as raised:
            backward(model, batches(rank, 1)[0])
        found.append(str(raised.value).split("from rank 2 in ")[1].partition(":")[0] == name)
    return found


RESUMED = [ErrorFeedback(Int8()), SPARSE]
POISONED = [*RESUMED, Int8(), Cast()]
CORRUPT = [
    {"gradients": CorruptScale()},
    {"gradients": ErrorFeedback(CorruptIndex(0.1))},
    {"parameters": CorruptScale()},
]


def three_ranks(rank):
    return {
        "gradients": compare_with_plain(rank, {k: row[:3] for k, row in PLAIN_CASES.items()}),
        "parameters": gather_parameters(rank, {k: row[:3] for k, row in GATHER_CASES.items()}),
        "resumed": resume(rank, RESUMED),
        "refused": serve_or_refuse(rank),
        "corrupt": send_garbage(rank, CORRUPT),
        "poisoned": poison(rank, POISONED),
        "named": name_what_is_not_finite(rank),
    }


@pytest.fixture(scope="module")
def found():
    """Return by case what each of three ranks has found."""
    results = run_ranks(3, three_ranks)
    return {case: [each[case] for each in results] for case in results[0]}


def test_gradients_are_those_of_plain_fsdp(found):
    results = found["gradients"]
    for case, (*_, error_bound, share_bound) in PLAIN_CASES.items():
        for error, residual_error, share, got in [each[case] for each in results]:
            assert error < error_bound, case
            assert residual_error < 2e-5, case  # the residuals hold the error
            assert share < share_bound, case
            assert got == results[0][case][3], case


def test_all_ranks_compute_with_the_same_parameters(found):
    results = found["parameters"]
    for case, (*_, bound) in GATHER_CASES.items():
        for error, gradient_error, shards_kept, counted, bits in [each[case] for each in results]:
            assert error < bound, case
            assert gradient_error < 10 * bound, case
            assert shards_kept, case
            assert counted, case
            assert bits == results[0][case][4], case


def test_a_run_is_resumed_bit_for_bit(found):
    for same, errors in found["resumed"]:
        assert same == {repr(each): True for each in RESUMED}
        assert errors == 3


def test_supported_ops_and_rejected_arguments(found):
    assert found["refused"] == [True] * 3


def test_a_corrupt_message_is_rejected_on_all_ranks_naming_its_sender(found):
    for messages in found["corrupt"]:
        assert len(messages) == len(CORRUPT)
        for message in messages:
            assert "got a corrupt one from rank 1" in message


def test_a_nan_ends_the_step_on_all_ranks_or_counts_as_zeros_or_is_seen(found):
    for results in found["poisoned"]:
        for compressor, of_policy in zip(POISONED, results, strict=True):
            error, goes_on = of_policy["raise"]
            assert "from rank 1 in " in error, compressor
            assert error == found["poisoned"][0][POISONED.index(compressor)]["raise"][0]
            assert goes_on, compressor
            assert of_policy["skip"], compressor
            seen, norm, sound = of_policy["allow"]
            assert seen, compressor
            assert math.isfinite(norm), compressor
            assert sound, compressor


def test_the_parameter_that_is_not_finite_is_named(found):
    assert found["named"] == [[True] * 3] * 3
