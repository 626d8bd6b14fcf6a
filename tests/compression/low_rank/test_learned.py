"""Learned gradient compression over gloo: invariants of each phase, and the gain of training."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel.comm import Run
from pyparallel.compression import (
    AttachPoint,
    AutoEncoder,
    BufferLayout,
    Collectives,
    CommStats,
    ConvAutoEncoder,
    CorruptMessageError,
    ErrorFeedback,
    Learned,
    StateStore,
    TopK,
    compress_ddp,
)
from tests.cases import slow
from tests.compression.hooks.steps import average
from tests.workers import assert_equal_on_all_ranks, call_each

CPU = torch.device("cpu")
NUMEL = 1003
PHASES = {"dense": 0, "learning": 2, "coded": 6}  # first step of each phase
NUM_STEPS = 12
SMALL = Learned(0.1, dense_steps=2, learning_steps=4, innovation=0.005)
SHAPES = [
    *((numel, torch.float32) for numel in (0, 2, 17)),
    *((numel, torch.bfloat16) for numel in (1, 160)),
    (17, torch.float16),
]
SHARED, INNOVATIONS = 100, 5  # entries of it


class Identity(AutoEncoder):
    """An auto-encoder without training or loss."""

    def init(self, device):
        return torch.zeros(0, device=device)

    def encode(self, weights, values):
        return values

    def decode(self, weights, code, numel):
        return code

    def __repr__(self):
        return "Identity()"


def gradients(rank, steps, numel=NUMEL):
    """Return gradients with a part common to all ranks, a part of the rank's own, and noise."""
    noise = torch.randn(steps, numel, generator=torch.Generator().manual_seed(100 + rank))
    own = torch.randn(numel, generator=torch.Generator().manual_seed(10 + rank))
    common = torch.randn(numel, generator=torch.Generator().manual_seed(0)) ** 3
    return common + 0.3 * own + 0.3 * noise


def true_means(steps, numel=NUMEL, members=(0, 1, 2)):
    return torch.stack([gradients(rank, steps, numel) for rank in members]).mean(0)


def run(compressor, xs, collectives=None):
    """Return the means of some steps, the final state, and the payload of each step."""
    collectives = collectives or Collectives()
    state = compressor.init(BufferLayout.flat(xs.shape[1]), CPU, collectives.rank)
    means, payloads = [], []
    for x in xs:
        collectives.stats = CommStats()
        means.append(x.clone())
        compressor.mean_(means[-1], state, collectives)
        payloads.append(collectives.stats.payload_bytes)
    return torch.stack(means), state, payloads


def messages_and_residuals_add_up_after_every_step(rank):
    """All ranks get the same bits, with the documented bytes of each phase."""
    compressor, collectives = ErrorFeedback(SMALL), Collectives()
    state = compressor.init(BufferLayout.flat(NUMEL), CPU, rank)
    sent, payloads, true = torch.zeros(NUMEL), [], true_means(NUM_STEPS).cumsum(0)
    for step, x in enumerate(gradients(rank, NUM_STEPS)):
        collectives.stats = CommStats()
        compressor.mean_(x, state, collectives)
        payloads.append(collectives.stats.payload_bytes)
        assert_equal_on_all_ranks(x.tolist())
        sent += x
        kept = average(state.entries["residual"])
        torch.testing.assert_close(sent + kept, true[step], atol=1e-4, rtol=1e-4)
        assert kept.any() == (step >= PHASES["learning"])
    code = 4 * -(-SHARED // 16)
    sparse = 4 * SHARED + 8 * INNOVATIONS
    learning = sparse + 4 * SHARED + 4 * code + 4 * ConvAutoEncoder().num_weights
    assert payloads == [4 * NUMEL] * 2 + [learning] * 4 + [sparse + 4 * code] * 6


def two_of_three_ranks_average(rank):
    pair = dist.new_group([0, 2])
    if rank == 1:
        return
    xs = gradients(rank, NUM_STEPS)
    means, state, _ = run(ErrorFeedback(SMALL), xs, Collectives(Run(pair)))
    true = true_means(NUM_STEPS, members=(0, 2))
    kept = average(state.entries["residual"], pair)
    torch.testing.assert_close(means.sum(0) + kept, true.sum(0), atol=1e-4, rtol=1e-4)


def without_loss_it_is_the_dense_mean(rank):
    for steps in ((9, 0), (0, 9), (0, 0)):  # of the dense and of the learning phase
        options = dict(zip(("dense_steps", "learning_steps"), steps, strict=True))
        compressor = ErrorFeedback(Learned(1.0, auto_encoder=Identity(), **options))
        torch.testing.assert_close(run(compressor, gradients(rank, 3))[0], true_means(3))


def non_finite_entries_reach_all_ranks_but_no_residual(rank):
    """The last rank has one in each phase."""
    for bad, where in ((float("nan"), torch.argmax), (float("inf"), torch.argmin)):
        xs = gradients(rank, NUM_STEPS)
        for first in PHASES.values() if rank == 2 else ():
            xs[first][where(xs[first].abs())] = bad
        means, state, _ = run(ErrorFeedback(SMALL), xs)
        seen = [step for step in range(NUM_STEPS) if not means[step].isfinite().all()]
        assert seen == list(PHASES.values())
        store = state.inner[0].common
        for kept in (state.entries["residual"], store["weights"], store["velocity"]):
            assert kept.isfinite().all(), (bad, where)


def any_length_and_dtype_adds_up(rank):
    for numel, dtype in SHAPES:
        xs = gradients(rank, 6, numel).to(dtype)
        compressor = ErrorFeedback(Learned(0.5, dense_steps=1, learning_steps=2))
        means, state, _ = run(compressor, xs)
        total = torch.stack([gradients(each, 6, numel).to(dtype) for each in range(3)])
        close = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.02}[dtype]
        found = means.float().sum(0) + average(state.entries["residual"])
        expected = total.float().mean(0).sum(0)
        torch.testing.assert_close(found, expected, atol=close, rtol=close, msg=f"{numel} {dtype}")
        assert means.dtype == dtype


def a_run_is_resumed_bit_for_bit(rank):
    layout = BufferLayout.of([("a", torch.empty(1000)), ("b", torch.empty(3))])
    xs, collectives = gradients(rank, NUM_STEPS), Collectives()
    for phase, first in PHASES.items():
        store = StateStore(ErrorFeedback(SMALL), rank, collectives.size)
        for x in xs[: first + 1].clone():
            store.compressor.mean_(x, store.of(layout, CPU), collectives)
        resumed = StateStore(ErrorFeedback(SMALL), rank, collectives.size)
        resumed.load_state_dict(store.state_dict())
        resumed.of(layout, CPU)  # before the first run writes its tensors
        mine, its = xs[first + 1 :].clone(), xs[first + 1 :].clone()
        for one, other in zip(mine, its, strict=True):
            store.compressor.mean_(one, store.of(layout, CPU), collectives)
            resumed.compressor.mean_(other, resumed.of(layout, CPU), collectives)
        assert torch.equal(mine, its), phase


class Garbling(Collectives):
    """Collectives in which rank 0 sends invalid shared indices, or rank 1 invalid innovations."""

    indices = ()
    innovation = None

    def all_gather(self, tensor):
        if self.rank == 1 and self.innovation is not None and tensor.dtype == torch.int32:
            tensor = torch.full_like(tensor, self.innovation)
        return super().all_gather(tensor)

    def broadcast_(self, tensor, source):
        if self.rank == source == 0:
            tensor[: len(self.indices)] = torch.tensor(self.indices)
        super().broadcast_(tensor, source)


def invalid_indices_are_rejected_on_all_ranks(rank):
    of_rank_0 = r"got a corrupt one from rank 0 \(shared indices must be distinct"
    of_rank_1 = rf"got a corrupt one from rank 1 \(.*in \[0, {NUMEL}\), got {NUMEL}"
    for indices, innovation, sentence in [
        *((wrong, None, of_rank_0) for wrong in ((5, 5), (-1, 3), (NUMEL, 3))),
        ((), NUMEL, of_rank_1),
    ]:
        collectives = Garbling()
        collectives.indices, collectives.innovation = indices, innovation
        with pytest.raises(CorruptMessageError, match=sentence):
            run(Learned(0.1, dense_steps=0), gradients(rank, 1), collectives)


def a_trained_code_beats_top_k_of_as_many_bytes(rank):
    xs = gradients(rank, 70, 2000)
    compressor = Learned(0.2, dense_steps=0, learning_steps=60, innovation=1e-9)
    means, state, payloads = run(compressor, xs)
    others, _, rival_payloads = run(TopK(payloads[-1] / 8 / 2000), xs[60:])
    true = true_means(70, 2000)[60:]
    error, rival_error = ((true - each).norm() / true.norm() for each in (means[60:], others))
    assert rival_payloads[-1] == pytest.approx(payloads[-1], rel=0.01)
    assert state.common["loss"] < 0.2
    assert error < rival_error < 1


def residuals_stay_bounded_with_different_gradients(rank):
    """Each rank has a constant gradient unlike the others'."""
    own = torch.randn(300, generator=torch.Generator().manual_seed(rank))
    options = {"learning_steps": 40, "learning_rate": 0.02}
    auto_encoder = ConvAutoEncoder((8, 16), 2)
    compressor = ErrorFeedback(replace(SMALL, auto_encoder=auto_encoder, **options))
    state = compressor.init(BufferLayout.flat(300), CPU, rank)
    norms = []
    for _ in range(90):
        compressor.mean_(own.clone(), state, Collectives())
        norms.append(float(state.entries["residual"].norm()))
    assert max(norms[80:]) < 1.2 * max(norms[60:80])


def a_model_learns_through_all_phases(rank):
    """A regression under DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 1)
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    compressor = ErrorFeedback(Learned(0.1, dense_steps=3, learning_steps=12, innovation=0.01))
    compress_ddp(ddp, compressor)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(40):
        inputs = torch.randn(32, 20, generator=generator)
        loss = (ddp(inputs).flatten() - inputs[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert max(losses[-10:]) < 0.2 * min(losses[:3])
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.parameters()])


CASES = [
    messages_and_residuals_add_up_after_every_step,
    two_of_three_ranks_average,
    without_loss_it_is_the_dense_mean,
    non_finite_entries_reach_all_ranks_but_no_residual,
    any_length_and_dtype_adds_up,
    a_run_is_resumed_bit_for_bit,
    invalid_indices_are_rejected_on_all_ranks,
]
TRAINED = [
    a_trained_code_beats_top_k_of_as_many_bytes,
    residuals_stay_bounded_with_different_gradients,
    a_model_learns_through_all_phases,
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, slow(TRAINED)], ids=["invariants", "trained"])
def test_cases(ranks, cases):
    ranks.run(3, call_each, [(case,) for case in cases])


def test_options_out_of_range_are_rejected(subtests):
    for options, sentence in [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"innovation": 0.0}, r"innovation must be in \(0, 1\], got 0.0"),
        ({"dense_steps": -1}, "dense_steps must be an integer of at least 0, got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0, got 0.0"),
    ]:
        with subtests.test(str(options)), pytest.raises(ValueError, match=sentence):
            Learned(**options)


def test_single_messages_are_rejected():
    layout = BufferLayout.flat(8)
    state = Learned().init(layout, CPU)
    with pytest.raises(RuntimeError, match="Learned must be used by mean_"):
        Learned().compress(torch.zeros(8), state)
    with pytest.raises(RuntimeError, match="Learned must be used by mean_"):
        Learned().decompress((), layout, torch.zeros(8))
    for compressor in (Learned(), ErrorFeedback(Learned())):
        supported = {place for place in AttachPoint if compressor.error_at(place) is None}
        assert supported == {AttachPoint.DDP}
    assert "use ErrorFeedback(TopK(0.001))" in Learned().error_at(AttachPoint.GOSSIP)


def test_repr_round_trips():
    compressor = Learned(0.1, auto_encoder=ConvAutoEncoder((4, 4), 1, seed=3))
    assert eval(repr(compressor)) == compressor
