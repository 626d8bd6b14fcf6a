"""The hook of DDP on three ranks."""

import copy
import datetime
import io
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel.comm import DisagreementError
from pyparallel.compression import (
    DGC,
    Cast,
    CorruptMessageError,
    ErrorFeedback,
    Int8,
    NonFiniteError,
    TopK,
    compress_ddp,
    merge_states,
)
from tests.compression.hooks.steps import (
    CorruptScale,
    average,
    batches,
    check_nan,
    each_policy,
    flat_gradients,
    gradients_of,
)
from tests.workers import assert_equal_on_all_ranks, call_each, observe_ranks

SHAPE = 4, 20  # of a batch
SMALL_BUCKETS = 0.01  # MiB: several, rebuilt after the first step
SPARSE = ErrorFeedback(TopK(0.01))


def build(width=100, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    ).to(dtype)


def wrap(model, **options):
    return DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_BUCKETS, **options})


def start(compressor, model, nonfinite="raise", **options):
    """Return the model in DDP with a hook, and the hook's state."""
    ddp = wrap(model, **options)
    state = compress_ddp(ddp, compressor, nonfinite=nonfinite)
    return ddp, state


def flat_residual(state, model):
    saved = state.state_dict()["parameters"]
    return torch.cat([saved[name]["residual"].flatten() for name, _ in model.named_parameters()])


def compare_with_dense(rank, compressor, options, error, share):
    dense, (ddp, state) = wrap(build()), start(compressor, build(), **options)
    expected = torch.zeros(sum(p.numel() for p in ddp.parameters()))
    for batch in batches(rank, 4, *SHAPE):
        truth, got = gradients_of(dense, batch), gradients_of(ddp, batch)
        assert (got - truth).norm() < error * truth.norm()
        expected += truth - got
        if isinstance(compressor, ErrorFeedback):  # the residuals hold the error
            left = expected - average(flat_residual(state, ddp.module))
            assert left.norm() < 1e-5 * truth.norm()
    assert state.last_step.payload_bytes < share * 4 * len(expected)
    assert_equal_on_all_ranks(got.tolist())


COMPARED = [  # compressor, DDP's options, largest error of a step, share of the dense bytes
    (Cast(), {}, 4e-3, 0.84),
    (Cast(accumulate=torch.bfloat16), {}, 1e-2, 0.51),
    (Int8(), {"gradient_as_bucket_view": True}, 3e-2, 0.45),
    (ErrorFeedback(Int8()), {"static_graph": True}, 5e-2, 0.45),
    (SPARSE, {"find_unused_parameters": True}, 1.0, 0.022),
    (TopK(1.0), {}, 1e-6, 2.01),
]
POISONED = [ErrorFeedback(Int8()), SPARSE, Cast(accumulate=torch.bfloat16), DGC(0.1)]


def resume_bit_for_bit(rank):
    """With one bucket, a resumed run computes the same bits."""
    whole, halves = [], []
    for steps, collected in ((4, whole), (2, halves)):
        ddp, state = start(SPARSE, build(), bucket_cap_mb=25)
        collected += [gradients_of(ddp, batch) for batch in batches(rank, steps, *SHAPE)]
    saved = copy.deepcopy(state.state_dict())
    ddp = wrap(build(), bucket_cap_mb=25)
    compress_ddp(ddp, SPARSE).load_state_dict(saved)
    halves += [gradients_of(ddp, batch) for batch in batches(rank, 4, *SHAPE)[2:]]
    assert all(map(torch.equal, whole, halves))


def resize(rank):
    """Resume two ranks' states on three: the mean residual is the same."""
    pair = dist.new_group([0, 1])
    states, residual = [], None
    if rank < 2:
        ddp = wrap(build(), process_group=pair)
        state = compress_ddp(ddp, SPARSE)
        for batch in batches(rank, 2, *SHAPE):
            gradients_of(ddp, batch)
        residual = average(flat_residual(state, ddp.module), pair)
        states = [None, None]
        dist.all_gather_object(states, state.state_dict(), group=pair)
    box = [merge_states(states, 3) if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    ddp = wrap(build())
    state = compress_ddp(ddp, SPARSE)
    state.load_state_dict(box[0])
    mine = average(flat_residual(state, ddp.module))
    gradients_of(ddp, batches(rank, 1, *SHAPE)[0])
    if residual is not None:
        torch.testing.assert_close(residual, mine)
        assert residual.norm() > 0


def accumulate(rank):
    dense, (ddp, _) = wrap(build()), start(Cast(), build())
    first, second = batches(rank, 2, *SHAPE)
    for model in (ddp, dense):
        with model.no_sync():
            model(first).square().mean().backward()
        model(second).square().mean().backward()
    torch.testing.assert_close(flat_gradients(ddp), flat_gradients(dense), rtol=2e-2, atol=1e-4)


def train_low_precision(rank):
    ddp, _ = start(ErrorFeedback(Int8()), build(dtype=torch.bfloat16))
    got = [gradients_of(ddp, batch) for batch in batches(rank, 3, *SHAPE, dtype=torch.bfloat16)]
    assert all(each.isfinite().all() for each in got)
    assert_equal_on_all_ranks(got[-1].tolist())


def meet_nan(rank, compressor, policy):
    check_nan(
        rank,
        lambda nonfinite: start(compressor, build(), nonfinite),
        batches(rank, 3, *SHAPE),
        policy,
        r"from rank 1 in 4\.bias: ",
    )


def name_what_is_not_finite(rank):
    """One parameter's gradient has an inf on rank 2, and another's on rank 0."""
    for compressor in (Int8(), Cast(accumulate=torch.bfloat16)):
        ddp, _ = start(compressor, build(), bucket_cap_mb=25)
        for bad_rank, place in ((2, 3), (0, 1)):
            if rank == bad_rank:
                parameter = list(ddp.module.parameters())[place]
                parameter.register_hook(lambda gradient: gradient - float("inf"))
        with pytest.raises(NonFiniteError) as raised:
            gradients_of(ddp, batches(rank, 1, *SHAPE)[0])
        assert "from rank 0 in 0.bias: " in str(raised.value)
        assert_equal_on_all_ranks(str(raised.value))


def overflow_float16(rank):
    """Finite gradients of float16 whose sum is not: nobody's gradient is to blame."""
    ddp, _ = start(Cast(torch.float16, accumulate=torch.float16), nn.Linear(1, 1))
    with pytest.raises(NonFiniteError, match=r"means must be finite.*of finite gradients"):
        ddp(torch.full((1, 1), 1e6)).sum().backward()


def compress_twice(rank):
    ddp, _ = start(Int8(), build())
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        compress_ddp(ddp, Int8())


def replace_parameters(rank):
    """DDP averages the parameters of its construction, others than compress_ddp has found."""
    ddp = wrap(nn.Sequential(nn.Linear(20, 3)))
    kept, ddp.module[0] = ddp.module[0], nn.Linear(20, 3)
    compress_ddp(ddp, Int8())
    ddp.module[0] = kept
    with pytest.raises(RuntimeError, match=r"must stay those that .* that is not in the module"):
        gradients_of(ddp, batches(rank, 1, *SHAPE)[0])


def disagree(rank):
    with pytest.raises(DisagreementError, match=r"same compressor, got Int8.* and Cast.*rank 1"):
        compress_ddp(wrap(build()), [Int8(), Cast(), Int8()][rank])
    with pytest.raises(DisagreementError, match=r"same compressor, got .* decay=0.9\) on rank 2"):
        compress_ddp(wrap(build()), ErrorFeedback(Int8(), decay=[1.0, 1.0, 0.9][rank]))
    sentence = r"^ranks 0-2: compressor must be an object such as Int8\(\) or TopK\(0.01\), got "
    for wrong, got in ((Int8, "the class Int8; create an object"), ("int8", "'int8'$")):
        with pytest.raises(TypeError, match=sentence + got):
            compress_ddp(wrap(build()), wrong)
    with pytest.raises(DisagreementError, match="same nonfinite, got skip on rank 0"):
        compress_ddp(wrap(build()), Int8(), nonfinite=["skip", "raise", "raise"][rank])
    ddp = wrap(build())
    with pytest.raises(TypeError, match=r"^rank 1: ddp must be a model in .*, got an object of"):
        compress_ddp(ddp.module if rank == 1 else ddp, Int8())


def differ_in_buffers(rank):
    """DDP takes such a model, and would broadcast other buffers than the ranks expect."""
    model = build()
    if rank == 1:
        model[0].register_buffer("steps", torch.zeros(3))
    sentence = "same number of buffers, got 0 on rank 0 and 1 on rank 1"
    with pytest.raises(DisagreementError, match=sentence):
        compress_ddp(DistributedDataParallel(model), Int8())
    with warnings.catch_warnings():  # torch 2.13 has another name for the argument
        warnings.simplefilter("ignore", FutureWarning)
        compress_ddp(DistributedDataParallel(model, broadcast_buffers=False), Int8())
    names = ["0.steps"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    compress_ddp(DistributedDataParallel(model), Int8())


def freeze(rank):
    """A frozen layer has no gradient, and the others' are those of plain DDP."""
    found = []
    for compressed in (False, True):
        model = build()
        model[0].requires_grad_(False)
        ddp = wrap(model)
        if compressed:
            compress_ddp(ddp, ErrorFeedback(TopK(1.0)))
        for batch in batches(rank, 2, *SHAPE):
            ddp.zero_grad()
            ddp(batch).square().mean().backward()
        assert model[0].weight.grad is None
        found.append(torch.cat([p.grad.flatten() for p in model[2:].parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def pickle_(rank):
    """A DDP saved whole goes on with its hook, compressed again and with the saved state."""
    ddp, state = start(SPARSE, build(), bucket_cap_mb=25)
    first, *others = batches(rank, 3, *SHAPE)
    gradients_of(ddp, first)
    file = io.BytesIO()
    torch.save([ddp, state.state_dict()], file)
    file.seek(0)
    loaded, saved = torch.load(file, weights_only=False)
    again = compress_ddp(loaded, SPARSE)
    again.load_state_dict(saved)
    for batch in others:
        assert torch.equal(gradients_of(loaded, batch), gradients_of(ddp, batch))
    assert torch.equal(flat_residual(again, ddp.module), flat_residual(state, ddp.module))


def profile_(rank):
    """A profile shows each bucket from its start to its mean, and the wait at the end."""
    for compressor in (TopK(0.5), Cast(), Cast(accumulate=torch.bfloat16)):
        ddp, _ = start(compressor, build())
        first, second = batches(rank, 2, *SHAPE)
        gradients_of(ddp, first)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            gradients_of(ddp, second)
        counts = {each.key: each.count for each in profile.key_averages()}
        assert counts["pyparallel::average_bucket"] > 1
        assert counts["pyparallel::wait_for_buckets"] == 1


class Corrupt(TopK):
    """A TopK whose second message on rank 1 has indices outside of the buffer."""

    def compress(self, x, state, residual=None):
        values, indices = super().compress(x, state, residual)
        if state.rank == 1 and state.step == 2:
            indices = indices + x.numel()
        return values, indices


def send_garbage(rank):
    for compressor in (Corrupt(0.1), CorruptScale()):  # by an all-gather, and by an all-to-all
        ddp, _ = start(compressor, build(), bucket_cap_mb=25)
        with pytest.raises(CorruptMessageError, match="got a corrupt one from rank 1"):
            [gradients_of(ddp, batch) for batch in batches(rank, 3, *SHAPE)]


@dataclass(frozen=True)
class Failing(Cast):
    """A Cast that raises once on some ranks, in a bucket followed by others of the same length."""

    failing_ranks: tuple[int, ...] = ()
    error: type[Exception] = ValueError

    def mean_(self, x, state, collectives, residual=None):
        if (
            state.step == 2
            and collectives.rank in self.failing_ranks
            and "6.weight" in state.layout.names
        ):
            state.step += 1
            raise self.error("out of paper")
        super().mean_(x, state, collectives, residual)


def build_deep():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), *(nn.Linear(64, 64) for _ in range(7)))


def fail_alone(rank, pair):
    """One rank continues after its error; no message may meet a wrong one."""
    ddp, _ = start(
        Failing(failing_ranks=(1,)), build_deep(), bucket_cap_mb=1e-4, process_group=pair
    )
    errors = []
    for batch in batches(rank, 5, *SHAPE):
        try:
            gradients_of(ddp, batch)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
            if rank == 0:
                break
    return errors


def fail_alike(rank):
    failing = Failing(failing_ranks=(0, 1, 2), error=NonFiniteError)
    dense, (ddp, state) = wrap(build_deep()), start(failing, build_deep(), bucket_cap_mb=1e-4)
    errors, payloads = [], []
    for step, batch in enumerate(batches(rank, 5, *SHAPE)):
        truth = gradients_of(dense, batch)
        if step == 2:
            with pytest.raises(NonFiniteError, match="out of paper"):
                gradients_of(ddp, batch)
        else:
            errors.append(float((gradients_of(ddp, batch) - truth).norm() / truth.norm()))
        payloads.append(state.last_step.payload_bytes)
    assert max(errors) < 0.01
    assert payloads[3] == payloads[1] > payloads[2]


def in_a_part_of_the_group(rank):
    group = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    dense = wrap(build(), process_group=group)
    ddp, _ = start(Cast(), build(), process_group=group)
    (batch,) = batches(rank, 1, *SHAPE)
    truth, got = gradients_of(dense, batch), gradients_of(ddp, batch)
    assert (got - truth).norm() < 0.01 * truth.norm()


def compile_(model):
    return torch.compile(model, backend="eager")  # the default one is slow to import


def refuse_a_compiled_backward(rank):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp, _ = start(SPARSE, build())
    with pytest.raises(ValueError, match="must get DDP's buckets, got a gradient, as of a comp"):
        gradients_of(ddp, batches(rank, 1, *SHAPE)[0])


class Layers(nn.Sequential):
    """A model with a forward of its own: as a whole, torch's own are not compiled."""

    def forward(self, x):
        return super().forward(x)


def compile_the_forward(rank):
    torch._dynamo.reset()
    dense, (ddp, _) = wrap(build()), start(TopK(1.0), Layers(*build()), bucket_cap_mb=25)
    compiled = torch.compile(ddp, backend="aot_eager")
    for batch in batches(rank, 3, *SHAPE):
        truth, got = gradients_of(dense, batch), gradients_of(compiled, batch)
        assert (got - truth).norm() < 1e-6 * truth.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def handle_models(rank):
    ddp, _ = start(SPARSE, build())
    gradients_of(copy.deepcopy(ddp), batches(rank, 1, *SHAPE)[0])
    names = [name for name, _ in ddp.module.named_parameters()]
    for model in (compile_(wrap(build())), wrap(compile_(build()))):
        assert list(compress_ddp(model, SPARSE)._names.values()) == names
    with pytest.raises(DisagreementError, match=r"an object such as Int8\(\).*TopK"):
        compress_ddp(ddp, TopK)
    rare, _ = start(TopK(0.5), nn.Embedding(4, 3, sparse=True))
    with pytest.raises(ValueError, match="must be dense, got sparse ones of weight"):
        rare(torch.tensor([rank])).sum().backward()
    waves, _ = start(Int8(), nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="real numbers to be compressed, got those of"):
        waves(torch.ones(2, dtype=torch.complex64)).abs().sum().backward()


def residual_in_memory_order(rank):
    """The residual of a channels_last parameter is saved in the shape of its memory order."""
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    dense = wrap(copy.deepcopy(convolution))
    ddp, state = start(ErrorFeedback(TopK(0.1)), convolution)
    batch = torch.randn(2, 3, 5, 5)
    for model in (ddp, dense):
        model(batch).mean().backward()  # linear in the weights
    expected = dense.module.weight.grad - ddp.module.weight.grad
    left = average(state.state_dict()["parameters"]["weight"]["residual"])
    torch.testing.assert_close(left, expected.permute(0, 2, 3, 1))


def leave(rank, pair):
    ddp, _ = start(Int8(), build(), process_group=pair)
    first, second = batches(rank, 2, *SHAPE)
    gradients_of(ddp, first)
    if rank == 3:
        raise KeyboardInterrupt
    gradients_of(ddp, second)


def fail_in_pairs(rank):
    """One rank of the first pair fails, and one of the second leaves."""
    timeout = datetime.timedelta(seconds=10)
    first, second = (dist.new_group(pair, timeout=timeout) for pair in ([0, 1], [2, 3]))
    return fail_alone(rank, first) if rank < 2 else leave(rank, second)


def test_gradients_are_means_over_ranks(ranks):
    ranks.run_each(3, compare_with_dense, COMPARED)


@each_policy(POISONED)
def test_a_nan_ends_the_step_on_all_ranks_or_counts_as_zeros_or_is_seen(ranks, rows):
    ranks.run_each(3, meet_nan, rows)


CASES = [
    resume_bit_for_bit, resize, accumulate, train_low_precision, compress_twice,
    replace_parameters, disagree,
    differ_in_buffers, freeze, pickle_, profile_,
    fail_alike, in_a_part_of_the_group, refuse_a_compiled_backward,
    compile_the_forward, handle_models, residual_in_memory_order,
    name_what_is_not_finite, overflow_float16, send_garbage,
]  # fmt: skip


def test_cases(ranks):
    ranks.run(3, call_each, [(case,) for case in CASES])


@pytest.mark.slow
def test_no_bucket_is_sent_after_one_has_failed_and_a_rank_left_waiting_raises():
    others, failed, waiting, left = observe_ranks(4, fail_in_pairs, time_limit=40, group_timeout=10)
    assert failed.error is None
    assert len(failed.value) == 3
    assert all("out of paper" in error for error in failed.value)
    assert others.error is None
    assert len(others.value) == 1
    assert left.error.startswith("KeyboardInterrupt")
    assert waiting.error is not None
    assert "limit" not in waiting.error
