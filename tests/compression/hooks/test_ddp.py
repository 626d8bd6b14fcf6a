import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel.comm import DisagreementError
from pyparallel.compression import (
    Cast,
    ErrorFeedback,
    Int8,
    NonFiniteError,
    TopK,
    ddp_hook,
    merge_states,
)
from pyparallel.compression.hooks.ddp import named_parameters
from tests.workers import observe_ranks, run_ranks

SMALL_BUCKETS = 0.01  # MiB: several, rebuilt after the first step
SPARSE = ErrorFeedback(TopK(0.01))


def build(width=100, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    ).to(dtype)


def wrap(model, **options):
    return DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_BUCKETS, **options})


def flat_gradients(model):
    return torch.cat([parameter.grad.flatten().float() for parameter in model.parameters()])


def batches(rank, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 20, generator=generator).to(dtype) for _ in range(count)]


def gradients_of(ddp, batch):
    ddp.zero_grad()
    ddp(batch).square().mean().backward()
    return flat_gradients(ddp)


def flat_residual(state, model):
    saved = state.state_dict()["parameters"]
    return torch.cat([saved[name]["residual"].flatten() for name, _ in model.named_parameters()])


def average(tensor, group=None):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def compare_with_dense(rank, compressor, options):
    dense, ddp = wrap(build()), wrap(build(), **options)
    state, hook = ddp_hook(compressor, ddp)
    ddp.register_comm_hook(state, hook)
    errors, residual_errors = [], []
    expected = torch.zeros(sum(p.numel() for p in ddp.parameters()))
    for batch in batches(rank, 4):
        truth, got = gradients_of(dense, batch), gradients_of(ddp, batch)
        errors.append(float((got - truth).norm() / truth.norm()))
        expected += truth - got
        if "ErrorFeedback" in repr(compressor):
            left = expected - average(flat_residual(state, ddp.module))
            residual_errors.append(float(left.norm() / truth.norm()))
    return (
        errors,
        residual_errors,
        state.last_step.payload_bytes / (4 * len(expected)),
        got.tolist(),
    )


@pytest.mark.parametrize(
    ("compressor", "options", "error", "share"),
    [
        (Cast(), {}, 4e-3, 0.84),
        (Int8(), {"gradient_as_bucket_view": True}, 3e-2, 0.45),
        (ErrorFeedback(Int8()), {"static_graph": True}, 5e-2, 0.45),
        (SPARSE, {"find_unused_parameters": True}, 1.0, 0.022),
        (TopK(1.0), {}, 1e-6, 2.01),
    ],
    ids=str,
)
def test_gradients_are_means_over_ranks(compressor, options, error, share):
    results = run_ranks(3, compare_with_dense, compressor, options)
    for errors, residual_errors, payload, got in results:
        assert max(errors) < error
        assert max(residual_errors, default=0) < 1e-5  # the residuals hold the error
        assert payload < share
        assert got == results[0][3]


def resume_bit_for_bit(rank):
    """With one bucket, a resumed run computes the same bits."""
    whole, halves = [], []
    for steps, collected in ((10, whole), (5, halves)):
        ddp = wrap(build(), bucket_cap_mb=25)
        state, hook = ddp_hook(SPARSE, ddp)
        ddp.register_comm_hook(state, hook)
        collected += [gradients_of(ddp, batch) for batch in batches(rank, steps)]
    saved = copy.deepcopy(state.state_dict())
    ddp = wrap(build(), bucket_cap_mb=25)
    state, hook = ddp_hook(SPARSE, ddp)
    state.load_state_dict(saved)
    ddp.register_comm_hook(state, hook)
    halves += [gradients_of(ddp, batch) for batch in batches(rank, 10)[5:]]
    return all(torch.equal(left, right) for left, right in zip(whole, halves, strict=True))


def test_a_run_is_resumed_bit_for_bit():
    assert run_ranks(2, resume_bit_for_bit) == [True, True]


def resize(rank):
    """Resume two ranks' states on three: the mean residual is the same."""
    pair = dist.new_group([0, 1])
    states, residual = [], None
    if rank < 2:
        ddp = wrap(build(), process_group=pair)
        state, hook = ddp_hook(SPARSE, ddp, process_group=pair)
        ddp.register_comm_hook(state, hook)
        for batch in batches(rank, 2):
            gradients_of(ddp, batch)
        residual = average(flat_residual(state, ddp.module), pair)
        states = [None, None]
        dist.all_gather_object(states, state.state_dict(), group=pair)
    box = [merge_states(states, 3) if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    ddp = wrap(build())
    state, hook = ddp_hook(SPARSE, ddp)
    state.load_state_dict(box[0])
    ddp.register_comm_hook(state, hook)
    mine = average(flat_residual(state, ddp.module))
    gradients_of(ddp, batches(rank, 1)[0])
    return residual is None or (bool(torch.allclose(residual, mine)) and float(residual.norm()) > 0)


def test_a_subgroup_and_another_number_of_ranks():
    assert run_ranks(3, resize) == [True] * 3


def accumulate(rank):
    ddp, dense = wrap(build()), wrap(build())
    ddp.register_comm_hook(*ddp_hook(Cast(), ddp))
    first, second = batches(rank, 2)
    for model in (ddp, dense):
        with model.no_sync():
            model(first).square().mean().backward()
        model(second).square().mean().backward()
    torch.testing.assert_close(flat_gradients(ddp), flat_gradients(dense), rtol=2e-2, atol=1e-4)
    return True


def test_no_sync_sends_nothing_and_adds_up():
    assert run_ranks(2, accumulate) == [True, True]


def train_low_precision(rank):
    ddp = wrap(build(dtype=torch.bfloat16))
    state, hook = ddp_hook(ErrorFeedback(Int8()), ddp)
    ddp.register_comm_hook(state, hook)
    got = [gradients_of(ddp, batch) for batch in batches(rank, 3, torch.bfloat16)]
    assert all(each.isfinite().all() for each in got)
    return got[-1].tolist()


def test_gradients_of_16_bits():
    first, second = run_ranks(2, train_low_precision)
    assert first == second


def poison(rank, compressor):
    """One rank's gradients are nan once; all ranks get nan, and the next step is finite."""
    ddp = wrap(build())
    state, hook = ddp_hook(compressor, ddp)
    ddp.register_comm_hook(state, hook)
    good, bad, later = batches(rank, 3)
    gradients_of(ddp, good)
    if rank == 1:
        bad = bad * float("nan")
    seen = gradients_of(ddp, bad)
    norm = state.residual_norm
    after = gradients_of(ddp, later)
    return bool(seen.isnan().any()), norm, bool(after.isfinite().all())


@pytest.mark.parametrize("compressor", [ErrorFeedback(Int8()), SPARSE], ids=str)
def test_nan_reaches_all_ranks_and_leaves_no_trace(compressor):
    for seen, norm, sound in run_ranks(2, poison, compressor):
        assert seen
        assert norm < float("inf")
        assert sound


def register_twice(rank):
    ddp, other = wrap(build()), wrap(build(width=50))
    state, hook = ddp_hook(Int8(), ddp)
    ddp.register_comm_hook(state, hook)
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        ddp.register_comm_hook(state, hook)
    other.register_comm_hook(state, hook)
    with pytest.raises(RuntimeError, match="must be used with the model it was created for"):
        gradients_of(other, batches(rank, 1)[0])
    return True


def test_a_hook_is_for_one_model_once():
    assert run_ranks(2, register_twice) == [True, True]


def disagree(rank):
    with pytest.raises(DisagreementError, match=r"same compressor, got Int8.* and Cast.*rank 1"):
        ddp_hook([Int8(), Cast()][rank], build())
    return True


def test_different_compressors_across_ranks_are_rejected():
    assert run_ranks(2, disagree) == [True, True]


def compute_in_doubles(rank):
    ddp = wrap(build(dtype=torch.float64))
    ddp.register_comm_hook(*ddp_hook(Int8(), ddp))
    gradients_of(ddp, batches(rank, 1, torch.float64)[0])


def test_an_unsupported_dtype_is_rejected():
    for outcome in observe_ranks(2, compute_in_doubles):
        assert "supports float32, bfloat16 and float16 only, got torch.float64" in outcome.error


class Corrupt(TopK):
    """A TopK whose second message on rank 1 has indices outside of the buffer."""

    def compress(self, x, state, residual=None):
        values, indices = super().compress(x, state, residual)
        if state.rank == 1 and state.step == 2:
            indices = indices + x.numel()
        return values, indices


class CorruptScale(Int8):
    """An Int8 whose second message on rank 1 has an invalid scale."""

    def compress(self, x, state, residual=None):
        codes, scales = super().compress(x, state, residual)
        if state.rank == 1 and state.step == 2:
            scales = scales - 1e9
        return codes, scales


def send_garbage(rank, compressor):
    ddp = wrap(build(), bucket_cap_mb=25)
    ddp.register_comm_hook(*ddp_hook(compressor, ddp))
    for batch in batches(rank, 3):
        gradients_of(ddp, batch)


@pytest.mark.parametrize(
    "compressor", [Corrupt(0.1), CorruptScale()], ids=["all-gather", "all-to-all"]
)
def test_a_corrupt_message_is_rejected_on_all_ranks_naming_its_sender(compressor):
    for outcome in observe_ranks(3, send_garbage, compressor, time_limit=40, group_timeout=20):
        assert "got a corrupt one from rank 1" in outcome.error


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


def fail_alone(rank):
    """One rank continues after its error; no message may meet a wrong one."""
    ddp = wrap(build_deep(), bucket_cap_mb=1e-4)
    ddp.register_comm_hook(*ddp_hook(Failing(failing_ranks=(1,)), ddp))
    errors = []
    for batch in batches(rank, 5):
        try:
            gradients_of(ddp, batch)
        except RuntimeError as error:
            errors.append(str(error))
            if rank == 0:
                break
    return errors


def test_no_bucket_is_sent_after_one_has_failed_on_one_rank():
    others, failed = observe_ranks(2, fail_alone, time_limit=40, group_timeout=10)
    assert failed.error is None
    assert len(failed.value) == 3
    assert all("out of paper" in error for error in failed.value)
    assert others.error is None
    assert len(others.value) == 1


def fail_alike(rank):
    dense, ddp = wrap(build_deep()), wrap(build_deep(), bucket_cap_mb=1e-4)
    state, hook = ddp_hook(Failing(failing_ranks=(0, 1), error=NonFiniteError), ddp)
    ddp.register_comm_hook(state, hook)
    errors, payloads = [], []
    for step, batch in enumerate(batches(rank, 5)):
        truth = gradients_of(dense, batch)
        if step == 2:
            with pytest.raises(RuntimeError, match="out of paper"):
                gradients_of(ddp, batch)
        else:
            errors.append(float((gradients_of(ddp, batch) - truth).norm() / truth.norm()))
        payloads.append(state.last_step.payload_bytes)
    return errors, payloads


def test_a_run_continues_after_an_error_on_all_ranks():
    for errors, payloads in run_ranks(2, fail_alike):
        assert max(errors) < 0.01
        assert payloads[3] == payloads[1] > payloads[2]


def in_pairs(rank):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dense, ddp = wrap(build(), process_group=pair), wrap(build(), process_group=pair)
    ddp.register_comm_hook(*ddp_hook(Cast(), ddp))
    (batch,) = batches(rank, 1)
    truth, got = gradients_of(dense, batch), gradients_of(ddp, batch)
    return float((got - truth).norm() / truth.norm())


def test_the_group_is_that_of_the_model():
    assert max(run_ranks(4, in_pairs)) < 0.01


def handle_models(rank):
    ddp = wrap(build())
    state, hook = ddp_hook(SPARSE, ddp)
    ddp.register_comm_hook(state, hook)
    gradients_of(copy.deepcopy(ddp), batches(rank, 1)[0])
    names = [name for name, _ in ddp.module.named_parameters()]
    for model in (ddp, torch.compile(ddp), wrap(torch.compile(build()))):
        assert [name for name, _ in named_parameters(model)] == names
    with pytest.raises(DisagreementError, match=r"an object such as Int8\(\).*TopK"):
        ddp_hook(TopK, ddp)
    rare = wrap(nn.Embedding(4, 3, sparse=True))
    rare.register_comm_hook(*ddp_hook(TopK(0.5), rare))
    with pytest.raises(RuntimeError, match="must be dense, got sparse ones of weight"):
        rare(torch.tensor([rank])).sum().backward()
    return residual_in_memory_order(rank)


def residual_in_memory_order(rank):
    """The residual of a channels_last parameter is saved in the shape of its memory order."""
    ddp, dense = (wrap(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)) for _ in range(2))
    state, hook = ddp_hook(ErrorFeedback(TopK(0.1)), ddp)
    ddp.register_comm_hook(state, hook)
    batch = torch.randn(2, 3, 5, 5)
    for model in (ddp, dense):
        model(batch).mean().backward()  # linear in the weights
    expected = dense.module.weight.grad - ddp.module.weight.grad
    left = average(state.state_dict()["parameters"]["weight"]["residual"])
    torch.testing.assert_close(left, expected.permute(0, 2, 3, 1))
    return True


def test_copied_and_compiled_models_sparse_gradients_and_channels_last():
    assert run_ranks(2, handle_models) == [True, True]


def leave(rank):
    ddp = wrap(build())
    ddp.register_comm_hook(*ddp_hook(Int8(), ddp))
    first, second = batches(rank, 2)
    gradients_of(ddp, first)
    if rank == 1:
        raise KeyboardInterrupt
    gradients_of(ddp, second)


def test_a_rank_left_waiting_raises():
    outcomes = observe_ranks(2, leave, time_limit=40, group_timeout=10)
    assert outcomes[0].error is not None
    assert "limit" not in outcomes[0].error
