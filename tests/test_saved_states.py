"""States that must not be loaded are refused on all ranks, which have changed nothing."""

import copy
import io
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.fsdp import fully_shard

from pyparallel import SGP, GossipDataParallel, PipelineTrainer, SubnetTrainer
from pyparallel.comm import DisagreementError
from pyparallel.compression import ErrorFeedback, TopK, compress_ddp, compress_fsdp
from pyparallel.gossip import GossipState
from pyparallel.gossip.topology import DirectedLinear, OnePeerExponential
from pyparallel.pipeline import OneForwardOneBackward, PipeDream
from pyparallel.subnets import Partition
from pyparallel.training import seal
from tests.cases import slow
from tests.gossip.every_algorithm import COVERING, DETERMINISTIC, EVERY_ALGORITHM

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=0.01)


NUM_FLIPS = 60
each_algorithm = pytest.mark.parametrize(
    "names", [COVERING, slow(DETERMINISTIC)], ids=["covering", "all"]
)


class Gossip:
    """A run with GossipDataParallel, as the other runs here: steps, and what is saved."""

    def __init__(self, algorithm=None, optimizer_fn=adamw):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 30))
        self.optimizer = optimizer_fn(model.parameters())
        algorithm = algorithm or SGP(OnePeerExponential(dist.get_world_size()), overlap=1)
        self.model = GossipDataParallel(model, self.optimizer, algorithm, bucket_cap_mb=0.0005)
        self.state = GossipState(self.model, self.optimizer)
        self.state_dict, self.load_state_dict = self.state.state_dict, self.state.load_state_dict

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(5, 4)).square().mean()
        self.model.record_loss(loss)
        loss.backward()
        self.optimizer.step()

    def close(self):
        self.model.close()


class Pipeline:
    """A run with PipelineTrainer."""

    def __init__(self, optimizer_fn=adamw):
        torch.manual_seed(3)
        self.trainer = PipelineTrainer(
            [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)],
            nn.functional.mse_loss, optimizer_fn, OneForwardOneBackward(), num_microbatches=2,
            split=[2], scheduler_fn=lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
        )  # fmt: skip
        self.state_dict = self.trainer.state_dict
        self.load_state_dict = self.trainer.load_state_dict

    def step(self):
        self.trainer.step(torch.randn(4, 4), torch.randn(4, 3))
        self.trainer.flush()

    def close(self):
        pass


class Subnets:
    """A run with SubnetTrainer."""

    def __init__(self, optimizer_fn=adamw):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.trainer = SubnetTrainer(model, optimizer_fn, Partition(), 2)
        self.state_dict = self.trainer.state_dict
        self.load_state_dict = self.trainer.load_state_dict

    def step(self):
        self.trainer.optimizer.zero_grad()
        self.trainer(torch.randn(5, 4)).square().mean().backward()
        self.trainer.optimizer.step()

    def close(self):
        self.trainer.close()


class Compression:
    """A run of DDP with compress_ddp."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(16, 32))
        compression = compress_ddp(self.model, ErrorFeedback(TopK(0.1)))
        self.state_dict = compression.state_dict
        self.load_state_dict = compression.load_state_dict

    def step(self):
        self.model(torch.randn(5, 16)).square().mean().backward()

    def close(self):
        pass


RUNS = {"gossip": Gossip, "pipeline": Pipeline, "subnets": Subnets, "compression": Compression}


def contents(state):
    """Return all of a state but its checksums, in a form that == compares bit for bit."""
    if isinstance(state, Tensor):
        # The stride of a single element may be any.
        flat = state.detach().contiguous().as_strided((state.numel(),), (1,))
        return state.dtype, state.shape, flat.view(torch.uint8).tolist()
    if hasattr(state, "values") and not callable(state.values):  # a RankState
        return contents(state.values)
    if isinstance(state, dict):
        return {key: contents(each) for key, each in state.items() if key != "checksums"}
    if isinstance(state, list | tuple):
        return [contents(each) for each in state]
    return struct.pack("d", state) if isinstance(state, float) else state


def to_bytes(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(content):
    return torch.load(io.BytesIO(content), weights_only=True)


def refusal(run, state):
    """Return the error with which a state is refused, or None; a refusal must change nothing."""
    before = contents(run.state_dict())
    try:
        run.load_state_dict(state)
    except DisagreementError as error:
        text = str(error)
    else:
        return None
    assert contents(run.state_dict()) == before, text
    return text


def load_flipped(run, rank):
    """Load files of rank 1 with one flipped bit each; return how many were refused, and where."""
    saved = to_bytes(run.state_dict())
    original = contents(run.state_dict())
    choice = random.Random(0)
    counts = dict.fromkeys(("by torch.load", "by the library", "equal", "silent"), 0)
    for _ in range(NUM_FLIPS):
        content, state = bytearray(saved), from_bytes(saved)
        # The ranks' files are not of one length.
        place, bit = choice.random(), choice.randrange(8)
        if rank == 1:
            content[int(place * len(content))] ^= 1 << bit
        readable = torch.ones(())
        try:
            state = from_bytes(bytes(content))
        except Exception:
            readable.zero_()
        dist.broadcast(readable, 1)
        if not readable:
            counts["by torch.load"] += 1
            continue
        try:
            run.load_state_dict(state)
            kind = "equal"
        except DisagreementError:
            kind = "by the library"
        same = torch.tensor(float(contents(run.state_dict()) == original))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        counts[kind if same else "silent"] += 1
        if not same:
            run.load_state_dict(from_bytes(saved))
    return counts


def flip(rank):
    found = {}
    for name, make in RUNS.items():
        run = make()
        for _ in range(3):
            run.step()
        found[name] = load_flipped(run, rank)
        run.close()
    return found


@pytest.mark.slow
def test_a_flipped_bit_is_never_loaded_silently(ranks):
    first, second = ranks.run(2, flip)
    print(first)  # noqa: T201
    assert first == second
    for name, counts in first.items():
        assert counts["silent"] == 0, (name, counts)
        assert counts["by the library"] > NUM_FLIPS / 12, (name, counts)
        assert sum(counts.values()) == NUM_FLIPS


def load_other_steps(rank, names):
    """Rank 1 has a file of one step later, of every algorithm; return the errors."""
    errors = {}
    for name in names:
        run = Gossip(EVERY_ALGORITHM[name](dist.get_world_size()), sgd)
        run.step()
        run.step()
        earlier = copy.deepcopy(run.state_dict())
        run.step()
        later = copy.deepcopy(run.state_dict())
        run.step()
        errors[name] = refusal(run, later if rank == 1 else earlier)
        run.load_state_dict(later)
        run.close()
    return errors


def load_other_steps_of_other_trainers(rank, _):
    errors = {}
    for name in ("pipeline", "subnets", "compression"):
        run = RUNS[name]()
        states = []
        for _ in range(3):
            run.step()
            run.step()
            states.append(copy.deepcopy(run.state_dict()))
        errors[name] = refusal(run, states[rank])
        run.load_state_dict(states[1])
        run.close()
    return errors


@each_algorithm
def test_files_of_different_steps_are_refused_on_all_ranks(ranks, names):
    for num_ranks, function in ((4, load_other_steps), (2, load_other_steps_of_other_trainers)):
        first, *others = ranks.run(num_ranks, function, names)
        assert all(other == first for other in others)
        for name, error in first.items():
            assert error is not None, name
            assert error.startswith("all ranks must have the same "), (name, error)
            assert "on rank 0 and" in error


def sealed(state):
    """Return a changed state with checksums of its own."""
    if hasattr(state, "values") and not callable(state.values):
        return type(state)(seal(state.values))
    return seal(state) if "format" in state else {key: sealed(each) for key, each in state.items()}


def inner(state):
    """Return the dict in which a trainer's entries are."""
    (value,) = state.values() if len(state) == 1 else (state,)
    return value.values if not isinstance(value, dict) else value


def set_weight(mass):
    def change(state):
        inner(state)["algorithm"]["buffers"][0]["weight"].fill_(mass)

    return change


def put(*path):
    *keys, last, value = path

    def change(state):
        place = inner(state)
        for key in keys:
            place = place[key]
        place[last] = value

    return change


def drop(*path):
    *keys, last = path

    def change(state):
        place = inner(state)
        for key in keys:
            place = place[key]
        del place[last]

    return change


EMPTY = {"state": {}, "param_groups": []}
MALFORMED = {
    "gossip": [
        *map(set_weight, (5.0, float("nan"), -1.0, 0.0, 1e300, 0.25)),
        *map(drop, ("algorithm", "config", "module", "optimizers")),
        drop("module", "0.weight"),
        drop("algorithm", "buffers"),
        put("module", "0.weight", torch.zeros(3)),
        put("module", None),
        put("optimizers", [EMPTY]),
        put("optimizers", [{}]),
        put("optimizers", 0, "state", 0, "exp_avg", torch.zeros(2)),
        put("optimizers", 0, "state", 0, "step", torch.tensor(float("nan"))),
        put("algorithm", "round", -1),
        put("algorithm", "round", 99),
        put("algorithm", "round", "1"),
        put("algorithm", "buffers", []),
        put("algorithm", "buffers", 0, "in_flight", "messages", []),
        put("config", 3),
    ],
    "pipeline": [
        *map(drop, ("module", "optimizers", "schedulers", "step")),
        put("module", {}),
        put("optimizers", [EMPTY]),
        put("optimizers", None),
    ],
    "subnets": [
        *map(drop, ("shards", "subnet", "optimizer", "round", "config")),
        put("round", -1),
        put("steps", None),
        put("shards", "rows", {}),
        put("shards", "states", {}),
        put("subnet", "0.weight", torch.zeros(1)),
        put("optimizer", EMPTY),
    ],
    "compression": [
        *map(drop, ("parameters", "common")),
        put("parameters", "weight", None),
        put("common", "weight", {}),
        put("common", "weight", "step", -3),
    ],
}


OTHER_FORMAT = "the state's format must be 3, that of this version of pyparallel, got 2"


def load_malformed(rank):
    """Return the errors for a file of rank 1, with its checksums and those before."""
    errors = {}
    for name, changes in MALFORMED.items():
        run = RUNS[name]()
        for _ in range(3):
            run.step()
        saved = copy.deepcopy(run.state_dict())
        run.step()
        for number, change in enumerate(changes):
            changed = copy.deepcopy(saved)
            if rank == 1:
                change(changed)
            errors[name, number, "damaged"] = refusal(run, changed)
            errors[name, number, "sealed"] = refusal(run, sealed(changed))
        other = copy.deepcopy(saved)
        put("format", 2)(other)
        errors[name, "other format"] = refusal(run, other if rank == 1 else saved)
        for number, state in enumerate([None, [], {}, {"other": 1}, {"0": None, "1": None}]):
            errors[name, number] = refusal(run, state if rank == 1 else saved)
        run.load_state_dict(sealed(saved))
        assert contents(run.state_dict()) == contents(saved), name
        run.close()
    return errors


def test_a_malformed_file_of_one_rank_is_refused_on_all_ranks(ranks):
    first, second = ranks.run(2, load_malformed)
    assert first == second
    for case, error in first.items():
        assert error is not None, case
        is_of_the_sum = error.startswith("the push-sum masses of all ranks' states must sum to 2")
        is_of_all = error.startswith("all ranks must have the same round of state_dict")
        assert error.startswith("rank 1: ") or is_of_the_sum or is_of_all, (case, error)
        assert "other format" not in case or OTHER_FORMAT in error, (case, error)


def load_other_optimizers(rank):
    errors = []
    for make in (Gossip, Pipeline, Subnets):
        run = make(optimizer_fn=sgd)
        run.step()
        saved = copy.deepcopy(run.state_dict())
        run.close()
        run = make(optimizer_fn=adamw)
        run.step()
        errors.append(refusal(run, saved))
        run.step()
        run.close()
    return errors


def test_the_state_of_another_optimizer_is_refused(ranks):
    first, second = ranks.run(2, load_other_optimizers)
    assert first == second
    for error in first:
        assert "must " in error
        assert "AdamW, got SGD" in error


class Sharded:
    """A run of FSDP2 with compressed gradients."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Linear(16, 32)
        fully_shard(self.model)
        self.compression = compress_fsdp(self.model, gradients=ErrorFeedback(TopK(0.1)))
        self.state_dict = self.compression.state_dict
        self.load_state_dict = self.compression.load_state_dict

    def step(self):
        self.model(torch.randn(5, 16)).square().mean().backward()


class Algorithm(Gossip):
    """A run with GossipDataParallel of which the algorithm's state alone is saved."""

    def __init__(self, algorithm=None):
        super().__init__(algorithm, sgd)
        self.state_dict = self.model.algorithm_state_dict
        self.load_state_dict = self.model.load_algorithm_state_dict


def save_after_steps(rank, names):
    """Return whether a state stays that of its step, of all trainers and algorithms."""
    found = {}
    algorithms = {name: EVERY_ALGORITHM[name](dist.get_world_size()) for name in names}
    gossip = {name: partial(Gossip, each) for name, each in algorithms.items()}
    parts = {f"{name}, in part": partial(Algorithm, each) for name, each in algorithms.items()}
    others = {name: run for name, run in RUNS.items() if name != "gossip"}
    for name, make in (others | gossip | parts | {"fsdp": Sharded}).items():
        run = make()
        run.step()
        state, before = run.state_dict(), contents(run.state_dict())
        run.step()
        run.step()
        run.load_state_dict(state)
        for _ in range(3):  # nor do steps after loading it write it
            run.step()
        saved = to_bytes(state)
        found[name] = contents(from_bytes(saved)) == contents(state) == before
        run.load_state_dict(from_bytes(saved))
        found[name] &= contents(run.state_dict()) == before
        if hasattr(run, "close"):
            run.close()
    return found


@each_algorithm
def test_a_state_stays_that_of_its_step(ranks, names):
    for found in ranks.run(2, save_after_steps, names):
        assert len(found) > 2 * len(names)
        assert all(found.values()), [case for case, is_equal in found.items() if not is_equal]


def save_when_it_cannot_be(rank):
    """Return the error for a state with microbatches in flight."""
    trainer = PipelineTrainer(
        [nn.Linear(4, 6), nn.Linear(6, 3)], nn.functional.mse_loss, sgd, PipeDream(),
        num_microbatches=2, split=[1],
    )  # fmt: skip
    trainer.step(torch.ones(4, 4), torch.ones(4, 3))
    with pytest.raises(RuntimeError) as error:
        trainer.state_dict()
    trainer.flush()
    trainer.state_dict()
    return str(error.value)


def test_a_state_has_no_microbatches_in_flight(ranks):
    for error in ranks.run(2, save_when_it_cannot_be):
        assert error.startswith("state_dict() must be called after flush(), got it with micro")


class LateStager(AsyncStager):
    """Copies a state in a thread, after an event: the latest that torch's stagers may do so."""

    def __init__(self):
        self.may_copy = Event()
        self.thread = ThreadPoolExecutor(1)

    def stage(self, state_dict):
        def copied():
            self.may_copy.wait()
            return copy.deepcopy(state_dict)

        return self.thread.submit(copied)

    def close(self):
        self.thread.shutdown()


def save_asynchronously(rank, folder):
    run = Gossip(SGP(OnePeerExponential(2), overlap=1))
    for _ in range(3):
        run.step()
    before = contents(run.state_dict())
    stager = LateStager()
    saving = dcp.async_save({"gossip": run.state}, checkpoint_id=folder, async_stager=stager)
    run.step()
    with run.model.consensus():
        stager.may_copy.set()
        saving.upload_completion.result()
    run.step()
    dcp.load({"gossip": run.state}, checkpoint_id=folder)
    stager.close()
    return contents(run.state_dict()) == before


def load_on_other_ranks(rank, folder, num_ranks):
    group = dist.new_group(range(num_ranks))
    if rank >= num_ranks:
        return None
    model = nn.Linear(3, 3)
    optimizer = sgd(model.parameters())
    algorithm = SGP(DirectedLinear(num_ranks))
    wrapped = GossipDataParallel(model, optimizer, algorithm, process_group=group)
    state = GossipState(wrapped, optimizer)
    with pytest.raises(DisagreementError, match="checkpoint_id must hold") as error:
        state.load(folder)
    return str(error.value)


def test_asynchronous_saving_and_loading_on_another_number_of_ranks(ranks, tmp_path):
    folder = str(tmp_path)
    assert ranks.run(2, save_asynchronously, folder) == [True, True]
    for num_ranks in (1, 3):
        errors = ranks.run(3, load_on_other_ranks, folder, num_ranks)[:num_ranks]
        names = [f"'rank-{rank}-of-{num_ranks}'" for rank in range(num_ranks)]
        for error in errors:
            assert error == errors[0]
            assert all(name in error for name in names)
            assert "got ['rank-0-of-2', 'rank-1-of-2']" in error
            assert "load a consensus into the bare module" in error
