"""PushSum with compressed messages: ranks are threads, or processes where they may fail."""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel.comm import PeerError
from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Cast,
    CorruptMessageError,
    Fp8,
    Int4,
    Int8,
    RandomK,
    Sign,
    TopK,
)
from pyparallel.gossip import DPSGD, SGP, Hierarchical
from pyparallel.gossip.push_sum.compressed_buffer import CompressedBuffer, choco_sgp
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.push_sum.replicas import Replicas
from pyparallel.gossip.topology import (
    Complete,
    DirectedExponential,
    Lazy,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
)
from tests.cases import slow
from tests.compression.catalog import CATALOG, LAYOUT
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import batches, flat, start, step, train, wrap
from tests.local_transport import LocalExchange, run_threads

KINDS = [Ring, OnePeerExponential, DirectedExponential, Complete, RandomMatching, Star]
KINDS += [StarWithChords]
COMPRESSORS = [Int8(), Int8(block_size=32, seed=5), Cast(), TopK(0.3)]


def compressed(buffers, exchange, topology, compressor, overlap=0):
    compressed_buffers = [
        CompressedBuffer(
            buffer, exchange, topology, compressor, BufferLayout.flat(buffer.numel(), name)
        )
        for buffer, name in zip(buffers, "abcdef", strict=False)
    ]
    return PushSum(compressed_buffers, exchange, topology, overlap)


def random(rank, *lengths, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(n, generator=generator).to(dtype) for n in lengths]


def numerator(averaging):
    """Return w * z of all buffers with messages in flight merged, in float64."""
    buffers, weight = averaging.as_merged()
    return torch.cat([weight * buffer.double() for buffer in buffers])


@settings(deadline=None, max_examples=10)
@given(
    kind=st.sampled_from(KINDS),
    compressor=st.sampled_from(COMPRESSORS),
    num_ranks=st.integers(1, 6),
    overlap=st.integers(0, 4),
    num_steps=st.integers(1, 15),
)
def test_mass_is_conserved_with_lossy_messages(kind, compressor, num_ranks, overlap, num_steps):
    topology = Lazy(kind(num_ranks), gamma=0.3)

    def rank_main(exchange):
        buffers = random(exchange.rank, 65, 5)
        added = torch.cat([buffer.double() for buffer in buffers])
        averaging = compressed(buffers, exchange, topology, compressor, overlap)
        for index in range(num_steps):
            averaging.before_step()
            averaging.before_update()
            for buffer, update in zip(
                buffers, random(1000 * index + exchange.rank, 65, 5), strict=True
            ):
                before = buffer.double()
                buffer.add_(0.1 * update)
                added[slice(65) if len(buffer) == 65 else slice(65, None)] += buffer - before
            averaging.after_update()
            averaging.after_step()
        merged = numerator(averaging)
        averaging.flush()
        assert torch.equal(merged, numerator(averaging))
        return added, merged, float(averaging.status.weight)

    results = run_threads(num_ranks, rank_main)
    assert sum(weight for *_, weight in results) == pytest.approx(num_ranks, abs=1e-9)
    expected, found = (sum(each) for each in list(zip(*results, strict=True))[:2])
    assert (found - expected).norm() <= 1e-6 * max(1, num_ranks) ** 0.5 * 10


@pytest.mark.parametrize("kind", [Ring, Star, StarWithChords])
def test_rounds_are_those_of_choco_sgp(kind):
    topology, compressor = Lazy(kind(4), 0.5), TopK(0.3)
    layout = BufferLayout.flat(65, "a")

    def compress(differences):
        rows = []
        for row in differences.float():
            message = compressor.compress(row, compressor.init(layout, row.device, 0))
            rows.append(torch.zeros(65))
            compressor.decompress(message, layout, rows[-1], accumulate=True)
        return torch.stack(rows).double()

    def rank_main(exchange):
        buffers = random(exchange.rank, 65)
        averaging = compressed(buffers, exchange, topology, compressor)
        history = []
        for _ in range(8):
            averaging.after_step()
            history.append((buffers[0].double(), float(averaging.status.weight)))
        return history

    z = torch.cat([random(rank, 65)[0].view(1, -1) for rank in range(4)]).double()
    w, replica = torch.ones(4, 1).double(), z
    results = run_threads(4, rank_main)
    for index in range(8):
        matrix = torch.from_numpy(topology.mixing_matrix(index))
        z, w, replica = choco_sgp(z, w, replica, compress if index else torch.zeros_like, matrix)
        for rank, history in enumerate(results):
            torch.testing.assert_close(history[index][0], z[rank], rtol=1e-5, atol=1e-5)
            assert history[index][1] == pytest.approx(float(w[rank]), abs=1e-12)


def distance_after(topology, compressor, num_rounds, dtype=torch.float32):
    """Return the RMS distance of the ranks, per entry, from their initial mean."""

    def rank_main(exchange):
        (buffer,) = random(0, 400, dtype=dtype)  # equal on all ranks for the uncompressed messages
        averaging = compressed([buffer], exchange, topology, compressor)
        for _ in range(topology.period):
            averaging.after_step()
        buffer.add_(random(1 + exchange.rank, 400, dtype=dtype)[0])
        start = averaging.status.weight * buffer.double()
        for _ in range(num_rounds):
            averaging.after_step()
        return start, buffer.double()

    starts, ends = zip(*run_threads(topology.num_ranks, rank_main), strict=True)
    mean = sum(starts) / len(starts)
    return float(torch.stack([end - mean for end in ends]).square().mean().sqrt())


@pytest.mark.parametrize(
    ("compressor", "gamma", "num_rounds"),
    [
        (Int8(), 1, 60),
        slow(Cast(), 1, 60),
        (TopK(0.3), 0.5, 100),
        slow(TopK(0.1), 0.2, 250),
        slow(RandomK(0.5, run_length=1), 0.3, 250),
    ],
    ids=str,
)
def test_ranks_reach_the_mean_to_float_precision(compressor, gamma, num_rounds):
    for kind in (OnePeerExponential, Star):
        assert distance_after(Lazy(kind(4), gamma), compressor, num_rounds) < 2e-6, kind


@pytest.mark.slow
def test_an_aggressive_compressor_needs_a_lazy_topology():
    assert distance_after(Complete(8), TopK(0.05), 60) > 10
    assert distance_after(Lazy(Complete(8), gamma=0.1), TopK(0.05), 60) < 0.5


def test_signs_reduce_the_consensus_distance_slowly():
    topology = Lazy(OnePeerExponential(4), gamma=0.1)
    assert distance_after(topology, Sign(block_size=32), 60) < 0.1
    assert distance_after(topology, Sign(block_size=32), 0) > 0.8


def test_bfloat16_buffers_reach_the_mean():
    assert distance_after(Ring(4), Int8(), 40, dtype=torch.bfloat16) < 2e-2


def test_int8_messages_after_the_first_are_a_quarter_of_its_size():
    def rank_main(exchange):
        averaging = compressed(random(0, 1024, 1), exchange, Ring(3), Int8(block_size=256))
        averaging.after_step()
        first = exchange.run.stats.wire_bytes
        averaging.after_step()
        return first, exchange.run.stats.wire_bytes - first

    headers = 2 * 64
    assert (
        run_threads(3, rank_main)
        == [(2 * (4096 + 4 + headers), 2 * (1024 + 4 * 4 + 1 + 4 + headers))] * 3
    )


def test_after_a_reset_the_first_messages_are_uncompressed():
    def rank_main(exchange):
        (buffer,) = random(exchange.rank, 100)
        averaging = compressed([buffer], exchange, Complete(3), TopK(0.01))
        averaging.after_step()
        buffer.fill_(2.5)
        averaging.reset()
        averaging.after_step()
        assert float(averaging.status.weight) == 1
        return buffer

    for buffer in run_threads(3, rank_main):
        assert buffer.tolist() == [2.5] * 100


GOSSIP_COMPRESSORS = [
    row.compressor
    for row in CATALOG
    if row.compressor.fixed_length and not row.compressor.error_at(AttachPoint.GOSSIP)
]


@pytest.mark.parametrize("compressor", GOSSIP_COMPRESSORS, ids=str)
def test_every_compressor_of_fixed_length(compressor):
    """Mass is conserved, replicas agree, and a run resumes bit for bit."""
    topology = Lazy(StarWithChords(3), 0.02)

    def rank_main(exchange):
        (values,) = random(exchange.rank, LAYOUT.numel)
        added = values.double()
        buffer = CompressedBuffer(values, exchange, topology, compressor, LAYOUT)
        averaging = PushSum([buffer], exchange, topology)
        for _ in range(4):
            averaging.after_step()
        averaging.send()
        saved = copy.deepcopy((averaging.state_dict(), values))
        runs = []
        for _ in range(2):
            averaging.load_state_dict(copy.deepcopy(saved[0]))
            values.copy_(saved[1])
            averaging.merge()
            for _ in range(4):
                averaging.after_step()
            runs.append(values.clone())
        assert torch.equal(*runs)
        replicas = averaging.state_dict()["buffers"][0]["replicas"]
        return added, averaging.status.weight * values.double(), replicas

    results = run_threads(3, rank_main)
    before, after = (sum(each) for each in list(zip(*results, strict=True))[:2])
    assert (after - before).norm() < 3e-6 * before.norm()
    held = {}
    for each in (replica for *_, replicas in results for replica in replicas):
        first = held.setdefault(each["sender"], each["replica"]["values"])
        assert torch.equal(first, each["replica"]["values"])
    assert len(held) == 3


class SeparatelyInt8(Int8):
    """A compressor that takes the separate passes, as any that is not of the library."""


class SeparatelyInt4(Int4):
    """As above."""


class SeparatelyFp8(Fp8):
    """As above."""


FUSED_AND_SEPARATE = [
    (Int8(), SeparatelyInt8()),
    (Int8(block_size=32, seed=5), SeparatelyInt8(block_size=32, seed=5)),
    (Int4(seed=1), SeparatelyInt4(seed=1)),
    (Fp8("e5m2"), SeparatelyFp8("e5m2")),
]


def test_one_pass_gives_the_bits_of_separate_passes():
    for kind, (fused, separate) in zip(KINDS[::2], FUSED_AND_SEPARATE, strict=True):
        topology = Lazy(kind(4), 0.6)

        def rank_main(exchange, compressor, look, topology=topology):
            buffers = random(exchange.rank, 700, 5)
            averaging = compressed(buffers, exchange, topology, compressor, overlap=2)
            for index in range(2 * topology.period + 3):
                averaging.before_step()
                for buffer, update in zip(buffers, random(index, 700, 5), strict=True):
                    buffer.add_(update, alpha=0.1)
                averaging.after_step()
                # Messages are then in the replicas before the round is merged.
                if look and index % 3 == 0:
                    averaging.as_merged()
                if look and index % 3 == 1:
                    averaging.load_state_dict(copy.deepcopy(averaging.state_dict()))
            averaging.flush()
            return *buffers, averaging.status.weight

        ways = [(fused, False), (fused, True), (separate, False)]
        expected, *others = (
            run_threads(4, functools.partial(rank_main, compressor=compressor, look=look))
            for compressor, look in ways
        )
        for found in others:
            for rank, tensors in enumerate(found):
                assert all(map(torch.equal, tensors, expected[rank])), (kind, fused, rank)


def test_bfloat16_differences_are_not_rounded_before_they_are_encoded():
    def rank_main(exchange):
        results = []
        for compressor in FUSED_AND_SEPARATE[0]:
            (buffer,) = random(exchange.rank, 700, dtype=torch.bfloat16)
            averaging = compressed([buffer], exchange, Ring(4), compressor)
            for _ in range(6):
                averaging.after_step()
            results.append(buffer)
        torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)

    run_threads(4, rank_main)


class FloatPasses(TorchDispatchMode):
    """Records the ops with a float tensor of 300 entries; codes are integers."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
        if any(each.numel() == 300 and each.is_floating_point() for each in tensors):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_quantized_round_is_one_pass_at_each_end():
    def rank_main(exchange):
        (buffer,) = random(exchange.rank, 300)
        averaging = compressed([buffer], exchange, Ring(3), Int8(seed=1))
        averaging.after_step()
        with FloatPasses() as passes:
            averaging.after_step()
        return passes.names

    expected = ["pyparallel::quantize_difference_", "pyparallel::mix_quantized_"]
    assert run_threads(3, rank_main) == [expected] * 3


class Tampering(LocalExchange):
    """Changes the int32 messages of rank 0, or its first code of 8 bits."""

    num_started = 0

    def start(self, sends, receives):
        step, self.num_started = self.num_started, self.num_started + 1
        for send in sends:
            if step == 1 and self.rank == 0 and send.tensor.dtype == torch.int32:
                send.tensor.add_(10**6)
            if step == 1 and self.rank == 0 and send.tensor.dtype == torch.int8:
                send.tensor[0] = -128
        return super().start(sends, receives)

    def global_rank(self, rank):
        return rank


@pytest.mark.parametrize("compressor", [TopK(0.1), Int8(seed=1)], ids=str)
def test_a_corrupt_message_is_an_error_on_its_receivers(compressor):
    def rank_main(exchange):
        exchange.__class__ = Tampering
        (buffer,) = random(exchange.rank, 40)
        averaging = compressed([buffer], exchange, Ring(3), compressor)
        averaging.after_step()
        before = buffer.clone()
        if exchange.rank == 0:
            averaging.after_step()
            return
        sentence = f"rank {exchange.rank}, step 1: .* corrupt one on edge 0 -> {exchange.rank}"
        for _ in range(2):
            with pytest.raises(CorruptMessageError, match=sentence):
                averaging.after_step()
        torch.testing.assert_close(buffer, before, rtol=1e-5, atol=1e-6)
        assert averaging.status.weight == 1

    run_threads(3, rank_main)


def test_entries_that_a_gpu_counts_as_corrupt_are_an_error_where_a_state_is_read(monkeypatch):
    def count(replicas, *, wait):
        return 3 if wait else 0

    def rank_main(exchange):
        exchange.__class__ = Tampering
        averaging = compressed(random(exchange.rank, 40), exchange, Ring(3), Int8())
        monkeypatch.setattr(Replicas, "corrupt_count", count)
        averaging.after_step()  # does not wait for the device
        sentence = f"rank {exchange.rank}, step 0: .* got 3 corrupt entries"
        for read in (averaging.state_dict, averaging.as_merged):
            with pytest.raises(CorruptMessageError, match=sentence):
                read()

    run_threads(3, rank_main)


def test_entries_that_a_gpu_has_counted_are_an_error_of_the_next_round():
    def rank_main(exchange):
        exchange.__class__ = Tampering
        averaging = compressed(random(exchange.rank, 40), exchange, Ring(3), Int8())
        averaging.after_step()
        averaging._round_buffers[0]._replicas._corrupt.tensor.add_(5)
        sentence = f"rank {exchange.rank}, step 1: .* got 5 corrupt entries up to now"
        for _ in range(2):
            with pytest.raises(CorruptMessageError, match=sentence):
                averaging.after_step()

    run_threads(3, rank_main)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("compressor", [TopK(0.1), Int4()], ids=str)
def test_a_round_that_fails_or_cannot_start_changes_nothing(compressor, starts):
    def fail(*_):
        raise PeerError("a neighbor is dead")

    def rank_main(exchange):
        (buffer,) = random(exchange.rank, 40)
        averaging = compressed([buffer], exchange, Complete(2), compressor)
        averaging.after_step()
        buffer.add_(torch.randn(40))
        before = buffer.clone()
        if starts:
            averaging.send()
            assert averaging.status.weight == 0.5
            assert not torch.equal(buffer, before)
            averaging._round_buffers[0]._round.wait = fail
        else:
            exchange.start = fail
        with pytest.raises(PeerError):
            (averaging.merge if starts else averaging.send)()
        torch.testing.assert_close(buffer, before, rtol=1e-5, atol=1e-6)
        assert averaging.status.weight == 1
        assert not averaging.status.in_flight

    run_threads(2, rank_main)


ALGORITHMS = {
    "plain": SGP(OnePeerExponential(4)),
    "int8": SGP(OnePeerExponential(4), compressor=Int8()),
    "overlap": SGP(OnePeerExponential(4), overlap=1, compressor=Int8()),
    "dpsgd": DPSGD(Lazy(Ring(4), 0.2), compressor=TopK(0.1)),
    "hierarchical": Hierarchical(SGP(Ring(2), compressor=Int8(seed=1)), 2),
}


def train_compressed(rank):
    """Return by algorithm: average model, consensus distance, bytes per step, push-sum weight."""
    results = {}
    for name, algorithm in ALGORITHMS.items():
        model, optimizer, wrapped = start(algorithm, momentum=0.9)
        train(model, optimizer, list(batches(rank, 3)), forward=wrapped)
        before = wrapped.bytes_sent
        train(model, optimizer, list(batches(rank, 5)), forward=wrapped)
        num_bytes = (wrapped.bytes_sent - before) / 5
        wrapped.flush()
        with wrapped.consensus() as averaged:
            mean = flat(averaged)
        results[name] = (
            mean,
            wrapped.consensus_distance(),
            num_bytes,
            float(wrapped.push_sum_weight),
        )
        wrapped.close()
    return results


def test_training_with_compressed_messages(ranks):
    results = ranks.run(4, train_compressed)[1]
    plain = results["plain"]
    for name, (mean, distance, num_bytes, weight) in results.items():
        assert weight == pytest.approx(1, abs=1e-9)
        if name in ("int8", "overlap"):
            torch.testing.assert_close(mean, plain[0], rtol=2e-2, atol=2e-2)
            assert distance < 2 * plain[1] + 1e-3
            assert num_bytes - 64 < 0.27 * plain[2]  # without the header
        assert mean.isfinite().all()


def tamper(exchange):
    """Make the exchange change the int32 tensors it sends."""
    start = exchange.start

    def change(sends, receives):
        for send in sends:
            if send.tensor.dtype == torch.int32:
                send.tensor.add_(10**6)
        return start(sends, receives)

    exchange.start = change


def send_corrupt_messages(rank):
    model, optimizer = wrap(SGP(Ring(3), compressor=TopK(0.5)), nn.Linear(4, 2))
    for index in range(20):
        if rank == 2 and index == 5:
            tamper(model._running.exchange)
        step(model, optimizer)


def test_all_ranks_end_if_one_sends_corrupt_messages(ranks):
    outcomes = ranks.observe(3, send_corrupt_messages, group_timeout=10)
    for rank in (0, 1):
        assert outcomes[rank].error.startswith(
            f"CorruptMessageError: rank {rank}, step 5: messages must be valid for their compressor"
        )
        assert f"got a corrupt one on edge 2 -> {rank} from rank 2" in outcomes[rank].error
    assert outcomes[2].error.startswith("PeerError: rank 2, step 7: the message on edge")
