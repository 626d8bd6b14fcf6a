"""Learned gradient compression over gloo: invariants of each phase, and the gain of training."""

from dataclasses import replace
from itertools import product

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
    ddp_hook,
)
from tests.workers import run_ranks

CPU = torch.device("cpu")
NUMEL = 1003
PHASES = {"dense": 0, "learning": 2, "coded": 6}  # first step of each phase
NUM_STEPS = 12
SMALL = Learned(0.1, dense_steps=2, learning_steps=4, innovation=0.005)
SHAPES = [
    *((numel, torch.float32) for numel in (0, 1, 2, 17)),
    *((numel, torch.bfloat16) for numel in (0, 17, 160)),
    *((numel, torch.float16) for numel in (1, 160)),
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


def run(compressor, rank, xs, collectives):
    """Return the means of some steps, the final state, and the statistics of each step."""
    state = compressor.init(BufferLayout.flat(xs.shape[1]), CPU, rank)
    means, all_stats = [], []
    for x in xs:
        collectives.stats = CommStats()
        means.append(x.clone())
        compressor.mean_(means[-1], state, collectives)
        all_stats.append(collectives.stats)
    return torch.stack(means), state, all_stats


def run_to_residuals(rank, collectives):
    compressor = ErrorFeedback(SMALL)
    state = compressor.init(BufferLayout.flat(NUMEL), CPU, rank)
    means, residuals, payloads = [], [], []
    for x in gradients(rank, NUM_STEPS):
        collectives.stats = CommStats()
        compressor.mean_(x, state, collectives)
        means.append(x)
        residuals.append(state.entries["residual"].clone())
        payloads.append(collectives.stats.payload_bytes)
    return torch.stack(means), torch.stack(residuals), payloads


def run_identities(rank, collectives):
    def means(**options):
        compressor = Learned(1.0, auto_encoder=Identity(), **options)
        return run(ErrorFeedback(compressor), rank, gradients(rank, 3), collectives)[0]

    return {
        "dense": means(dense_steps=9),
        "learning": means(dense_steps=0, learning_steps=9),
        "coded": means(dense_steps=0, learning_steps=0),
    }


def run_poisoned(rank, collectives):
    """Run with a non-finite gradient on the last rank, once in each phase."""
    found = {}
    for bad in (float("nan"), float("inf")):
        for where in ("largest", "smallest"):
            xs = gradients(rank, NUM_STEPS)
            if rank == collectives.size - 1:
                for first in PHASES.values():
                    magnitudes = xs[first].abs()
                    xs[first][
                        magnitudes.argmax() if where == "largest" else magnitudes.argmin()
                    ] = bad
            means, state, _ = run(ErrorFeedback(SMALL), rank, xs, collectives)
            store = state.inner[0].common
            kept = [state.entries["residual"], store["weights"], store["velocity"]]
            found[str(bad), where] = means, kept
    return found


def run_shapes(rank, collectives):
    found = {}
    for numel, dtype in SHAPES:
        xs = gradients(rank, 6, numel).to(dtype)
        compressor = ErrorFeedback(Learned(0.5, dense_steps=1, learning_steps=2))
        means, state, _ = run(compressor, rank, xs, collectives)
        found[numel, dtype] = xs.float(), means, state.entries["residual"]
    return found


def run_resumed(rank, collectives):
    """Return the means after loading a state in each phase, and those of the uninterrupted run."""
    layout = BufferLayout.of([("a", torch.empty(1000)), ("b", torch.empty(3))])
    xs = gradients(rank, NUM_STEPS)
    outcomes = {}
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
        outcomes[phase] = mine, its
    return outcomes


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


def run_garbled(rank, _):
    sentences = []
    for indices, innovation in [((5, 5), None), ((-1, 3), None), ((NUMEL, 3), None), ((), NUMEL)]:
        collectives = Garbling()
        collectives.indices, collectives.innovation = indices, innovation
        try:
            run(Learned(0.1, dense_steps=0), rank, gradients(rank, 1), collectives)
        except CorruptMessageError as error:
            sentences.append(str(error))
    return sentences


def run_trained(rank, collectives):
    """Return errors relative to the true mean, by code alone and by top-k with as many bytes."""
    xs = gradients(rank, 70, 2000)
    compressor = Learned(0.2, dense_steps=0, learning_steps=60, innovation=1e-9)
    means, state, all_stats = run(compressor, rank, xs, collectives)
    budget = all_stats[-1].payload_bytes
    rival = TopK(budget / 8 / 2000)
    others, _, rival_stats = run(rival, rank, xs[60:], collectives)
    return means[60:], others, (budget, rival_stats[-1].payload_bytes), state.common["loss"]


def run_unlike(rank, collectives):
    """Return residual norms when each rank has a constant gradient unlike the others'."""
    own = torch.randn(300, generator=torch.Generator().manual_seed(rank))
    options = {"learning_steps": 40, "learning_rate": 0.02}
    auto_encoder = ConvAutoEncoder((8, 16), 2)
    compressor = ErrorFeedback(replace(SMALL, auto_encoder=auto_encoder, **options))
    state = compressor.init(BufferLayout.flat(300), CPU, rank)
    norms = []
    for _ in range(90):
        compressor.mean_(own.clone(), state, collectives)
        norms.append(float(state.entries["residual"].norm()))
    return norms


def train(rank, collectives):
    """Return losses of a regression under DDP through all phases, and the final gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 1)
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    compressor = ErrorFeedback(Learned(0.1, dense_steps=3, learning_steps=12, innovation=0.01))
    ddp.register_comm_hook(*ddp_hook(compressor, ddp))
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
    return losses, torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def run_all(rank):
    pair = dist.new_group([0, 2])
    collectives = Collectives()
    cases = {
        "residuals": run_to_residuals,
        "pair": lambda rank, _: (
            None if rank == 1 else run_to_residuals(rank, Collectives(Run(pair)))
        ),
        "identities": run_identities,
        "poisoned": run_poisoned,
        "shapes": run_shapes,
        "resumed": run_resumed,
        "garbled": run_garbled,
        "trained": run_trained,
        "unlike": run_unlike,
        "train": train,
    }
    return {name: case(rank, collectives) for name, case in cases.items()}


@pytest.fixture(scope="module")
def outcomes():
    """Run all cases on three ranks; return results by name."""
    found = run_ranks(3, run_all)
    return {name: [each[name] for each in found] for name in found[0]}


def true_means(steps, numel=NUMEL):
    return torch.stack([gradients(rank, steps, numel) for rank in range(3)]).mean(0)


def test_all_ranks_get_the_same_bits(outcomes):
    for means, _, _ in outcomes["residuals"][1:]:
        assert torch.equal(means, outcomes["residuals"][0][0])


def test_messages_and_residuals_add_up_after_every_step(outcomes):
    sent = outcomes["residuals"][0][0].cumsum(0)
    kept = torch.stack([residuals for _, residuals, _ in outcomes["residuals"]]).mean(0)
    torch.testing.assert_close(sent + kept, true_means(NUM_STEPS).cumsum(0), atol=1e-4, rtol=1e-4)
    assert not kept[PHASES["learning"] - 1].any()
    assert all(kept[step].any() for step in range(PHASES["learning"], NUM_STEPS))


def test_a_group_of_two_of_three_ranks(outcomes):
    (means, kept, _), _, (others, other_kept, _) = outcomes["pair"]
    true = (gradients(0, NUM_STEPS) + gradients(2, NUM_STEPS)) / 2
    assert torch.equal(means, others)
    torch.testing.assert_close(
        means.sum(0) + (kept + other_kept)[-1] / 2, true.sum(0), atol=1e-4, rtol=1e-4
    )


def test_each_phase_sends_the_documented_bytes(outcomes):
    code = 4 * -(-SHARED // 16)
    sparse = 4 * SHARED + 8 * INNOVATIONS
    learning = sparse + 4 * SHARED + 4 * code + 4 * ConvAutoEncoder().num_weights
    expected = [4 * NUMEL] * 2 + [learning] * 4 + [sparse + 4 * code] * 6
    assert outcomes["residuals"][0][2] == expected


def test_without_loss_it_is_the_dense_mean(subtests, outcomes):
    for phase in PHASES:
        with subtests.test(str(phase)):
            for each in outcomes["identities"]:
                torch.testing.assert_close(each[phase], true_means(3))


def test_non_finite_entries_reach_all_ranks_but_no_residual(subtests, outcomes):
    for bad, where in product(["nan", "inf"], ["largest", "smallest"]):
        with subtests.test(f"{bad} {where}"):
            for each in outcomes["poisoned"]:
                means, kept = each[bad, where]
                seen = [step for step in range(NUM_STEPS) if not means[step].isfinite().all()]
                assert seen == list(PHASES.values())
                assert all(tensor.isfinite().all() for tensor in kept)


def test_any_length_and_dtype_adds_up(outcomes):
    for key in outcomes["shapes"][0]:
        xs, means, kept = zip(*(each[key] for each in outcomes["shapes"]), strict=True)
        total = torch.stack(xs).mean(0).sum(0)
        rounding = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.02}[key[1]]
        sent = means[0].float().sum(0)
        torch.testing.assert_close(
            sent + torch.stack(kept).mean(0), total, atol=rounding, rtol=rounding, msg=f"{key}"
        )
        assert means[0].dtype == key[1]


def test_a_run_is_resumed_bit_for_bit(subtests, outcomes):
    for phase in PHASES:
        with subtests.test(str(phase)):
            for each in outcomes["resumed"]:
                mine, its = each[phase]
                assert torch.equal(mine, its)


def test_invalid_indices_are_rejected_on_all_ranks(outcomes):
    for sentences in outcomes["garbled"]:
        assert len(sentences) == 4
        for sentence in sentences[:3]:
            assert "got a corrupt one from rank 0 (shared indices must be distinct" in sentence
        assert "got a corrupt one from rank 1 (" in sentences[3]
        assert f"in [0, {NUMEL}), got {NUMEL}" in sentences[3]


def test_residuals_stay_bounded_with_different_gradients(outcomes):
    for norms in outcomes["unlike"]:
        assert max(norms[80:]) < 1.2 * max(norms[60:80])


def test_a_trained_code_beats_top_k_of_as_many_bytes(outcomes):
    means, others, (budget, rival_budget), loss = outcomes["trained"][0]
    true = true_means(70, 2000)[60:]
    error, rival_error = ((true - each).norm() / true.norm() for each in (means, others))
    assert rival_budget == pytest.approx(budget, rel=0.01)
    assert loss < 0.2
    assert error < rival_error < 1


def test_a_model_learns_through_all_phases(outcomes):
    for losses, parameters in outcomes["train"]:
        assert max(losses[-10:]) < 0.2 * min(losses[:3])
        assert torch.equal(parameters, outcomes["train"][0][1])


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
        supported = {place for place in AttachPoint if compressor.validation_error(place) is None}
        assert supported == {AttachPoint.DDP}
    assert "use ErrorFeedback(TopK(0.001))" in Learned().validation_error(AttachPoint.GOSSIP)


def test_repr_round_trips():
    compressor = Learned(0.1, auto_encoder=ConvAutoEncoder((4, 4), 1, seed=3))
    assert eval(repr(compressor)) == compressor
