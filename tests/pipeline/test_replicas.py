"""Replicas of a pipeline: against one pipeline, plain gossip, and a history of all replicas."""

import copy
import io
import os
import re
import signal
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, mse_loss

from pyparallel import GossipDataParallel
from pyparallel.comm import NonFiniteError
from pyparallel.compression import Int8
from pyparallel.gossip import SGP, AllReduce, DiLoCo, Hierarchical, LeaderSGD
from pyparallel.gossip.topology import Complete, Ring
from pyparallel.optim import AdamW
from pyparallel.pipeline import (
    Displacement,
    GPipe,
    Interlocking,
    LastUpdate,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
    StageError,
    ZeroBubble,
)
from pyparallel.pipeline.replicas import place_of_replicas
from tests.cases import nightly, pairwise, slow
from tests.gossip.every_algorithm import EVERY_ALGORITHM
from tests.pipeline.models import OPTIMIZERS, SPLITS, build_calls, smooth_muon
from tests.pipeline.models import build_layers as build_all_layers
from tests.pipeline.reference import (
    Correction,
    cut,
    make_stage,
    microbatches,
    microbatches_per_update,
    predict,
    reads,
    repeat_last_update,
    run_microbatch,
    updates_late,
)
from tests.workers import observe_ranks

MICROBATCHES = 3
CUTS = SPLITS | {3: [4, 8]}
SAMPLES = 12, 17, 13  # of the replicas' batches
FLUSHING = [GPipe(), OneForwardOneBackward(), ZeroBubble()]
STREAMING = [
    PipeOptim("live", prediction=Displacement()),
    PipeOptim("consistent", prediction=Displacement()),
    PipeDream2BW(),
    PipeDream2BW(prediction=Displacement()),
]
ALGORITHMS = [SGP(Complete(2)), SGP(overlap=1), DiLoCo(3)]
OURS = {
    "momentum": OPTIMIZERS["momentum"],
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=0.01),
    "fused AdamW": partial(AdamW, lr=0.01, weight_decay=0.1, eps=0.01),
    **{name: OPTIMIZERS[f"{name}, PredictedAdamW"] for name in ("Muon", "Lion")},
}


def build_layers(dtype=torch.float32, *, has_statistics=False):
    """The layers of the other tests; statistics of batches are of each replica alone."""
    layers = build_all_layers(dtype)
    if not has_statistics:
        layers[4] = nn.Tanh()
    return layers


def calls_of(replica, samples=12, dtype=torch.float32):
    return build_calls(15, samples, dtype)[replica::3]


def make(
    shape, schedule, algorithm, optimizer="momentum", dtype=torch.float32, *,
    has_statistics=False, **options,
):  # fmt: skip
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "stage"))
    replica = mesh.get_local_rank("replicate")
    layers = build_layers(dtype, has_statistics=has_statistics)
    for tensor in nn.Sequential(*layers).state_dict().values():
        tensor.add_(replica)  # all begin with those of the first replica
    trainer = PipelineTrainer(
        layers, mse_loss, OURS[optimizer], schedule, mesh=mesh, replicas=algorithm,
        num_microbatches=MICROBATCHES, split=CUTS[shape[1]], **options,
    )  # fmt: skip
    return trainer, replica


def state_of(trainer):
    return {k: v.clone() for stage in trainer.stages for k, v in stage.module.state_dict().items()}


def average_gradients(rank, schedule, shape):
    trainer, replica = make(shape, schedule, AllReduce(), "AdamW", torch.float64, max_norm=0.5)
    losses = [trainer.step(*call) for call in calls_of(replica, SAMPLES[replica], torch.float64)]
    return losses, state_of(trainer)


def join_batches(rank, schedule, shape):
    num_replicas, num_stages = shape
    trainer = PipelineTrainer(
        build_layers(torch.float64), mse_loss, OURS["AdamW"], schedule,
        num_microbatches=2 * MICROBATCHES, split=CUTS[num_stages], max_norm=0.5,
    )  # fmt: skip
    of_replicas = [calls_of(r, SAMPLES[r], torch.float64) for r in range(num_replicas)]
    steps = zip(*of_replicas, strict=True)
    losses = [trainer.step(*map(torch.cat, zip(*calls, strict=True))) for calls in steps]
    return losses, state_of(trainer)


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        (OneForwardOneBackward(), (2, 2)),
        slow(ZeroBubble(), (2, 2)),
        slow(GPipe(), (2, 2)),
        slow(GPipe(), (2, 3)),
        slow(ZeroBubble(), (3, 2)),
    ],
    ids=str,
)
def test_averaged_gradients_are_those_of_one_pipeline_with_the_joined_batch(ranks, schedule, shape):
    num_replicas, num_stages = shape
    expected = ranks.run(num_stages, join_batches, schedule, shape)
    found = ranks.run(num_replicas * num_stages, average_gradients, schedule, shape)
    for rank, (_, state) in enumerate(found):
        for name, value in expected[rank % num_stages][1].items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    of_last = [losses for losses, _ in found[num_stages - 1 :: num_stages]]
    shares = torch.tensor(SAMPLES[:num_replicas], dtype=torch.float64)
    means = shares / shares.sum() @ torch.tensor(of_last, dtype=torch.float64)
    torch.testing.assert_close(means, torch.tensor(expected[-1][0], dtype=torch.float64))


def interlock(rank, algorithm):
    """Train with a head on the first of two stages, of replicas or of one pipeline with both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))
    replica, is_alone = mesh.get_local_rank("replicate"), algorithm is None
    options = {"process_group": mesh.get_group("stage")} if is_alone else {"mesh": mesh}
    torch.manual_seed(0 if is_alone else replica)  # all begin with the head of the first replica
    head = nn.Linear(6, 2)
    trainer = PipelineTrainer(
        build_layers(), mse_loss, partial(torch.optim.SGD, lr=0.1),
        Interlocking(1, head), num_microbatches=MICROBATCHES, split=[3],
        replicas=algorithm, **options,
    )  # fmt: skip
    for both in zip(*map(calls_of, range(2)), strict=True):
        trainer.step(*(map(torch.cat, zip(*both, strict=True)) if is_alone else both[replica]))
    (stage,) = trainer.stages
    of_head = {} if stage.head is None else stage.head.module.state_dict()
    return state_of(trainer), {name: value.clone() for name, value in of_head.items()}


@pytest.mark.slow
def test_heads_are_averaged_with_their_stages(ranks):
    """After plain SGD the average of equal weights is a step on the joined batch."""
    alone, averaged = ranks.run_each(4, interlock, [(None,), (SGP(Complete(2)),)])
    for rank, found in enumerate(averaged):
        for own, expected in zip(found, alone[rank % 2], strict=True):
            assert own.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(own[name], value, rtol=0, atol=1e-5)
    assert averaged[0][1]


@smooth_muon()
def gossip(rank, schedule, algorithm, optimizer, depth, dtype):
    trainer, replica = make((2, depth), schedule, algorithm, optimizer, dtype)
    calls = calls_of(replica, dtype=dtype)
    losses = [trainer.step(*call) for call in calls[:4]]
    trainer.flush()
    losses.append(trainer.step(*calls[4]))
    trainer.flush()
    return losses, state_of(trainer)


def overwrite(version, weights):
    for name, value in weights.items():
        version.parameters[name].data.copy_(value)
    return version


def mean_of(weights):
    return {name: sum(each[name] for each in weights) / len(weights) for name in weights[0]}


class Reference:
    """All replicas in one process, each with the history of every stage; of two, so P is 1/2."""

    def __init__(self, schedule, algorithm, optimizer, depth, dtype):
        self.schedule, self.algorithm, self.depth = schedule, algorithm, depth
        self.every = microbatches_per_update(schedule, MICROBATCHES)
        self.replicas = []
        for _ in range(2):
            stages = []
            for index, module in enumerate(cut(build_layers(dtype), CUTS[depth])):
                late = updates_late(schedule, index, depth, MICROBATCHES)
                own = Correction(schedule, depth - 1 - index, None, late, depth)
                repeats = isinstance(schedule.prediction, LastUpdate)
                rule = repeat_last_update if repeats else predict
                stages.append(make_stage(module, OURS[optimizer], rule, own))
            self.replicas.append(stages)
        self.slow = [stage.history[-1].weights() for stage in self.replicas[0]]
        self.velocity = [{} for _ in self.slow]
        self.num_updates, self.in_flight = 0, False

    def train(self, streams):
        """Return the losses of each replica's microbatches."""
        losses = [[], []]
        for calls in streams:
            of_replicas = [microbatches(each, MICROBATCHES, self.every) for each in calls]
            for m, batches in enumerate(zip(*of_replicas, strict=True)):
                rules = [
                    reads(self.schedule, m, s, self.depth, MICROBATCHES) for s in range(self.depth)
                ]
                for replica, batch in enumerate(batches):
                    stages = self.replicas[replica]
                    losses[replica].append(run_microbatch(stages, rules, mse_loss, *batch))
                if (m + 1) % self.every == 0:
                    self.update()
            if self.in_flight:
                for index in range(self.depth):
                    self.merge(index)
                self.in_flight = False
            for stages in self.replicas:
                for stage in stages:
                    stage.flush()
        return losses

    def update(self):
        self.num_updates += 1
        for index in range(self.depth):
            same = [stages[index] for stages in self.replicas]
            if self.in_flight:  # the gradient was computed meanwhile
                before = [stage.history[-1] for stage in same]
                mean = mean_of([each.weights() for each in before])
                after = [
                    overwrite(copy.deepcopy(each), mean).after(stage.gradients, stage.correction)
                    for each, stage in zip(before, same, strict=True)
                ]
                for stage, version in zip(same, after, strict=True):
                    stage.history.append(version)
                    stage.gradients = {}
            else:
                for stage in same:
                    stage.update()
            match self.algorithm:
                case SGP(overlap=0):
                    self.merge(index)
                case DiLoCo(interval=interval) if self.num_updates % interval == 0:
                    self.step_outer(index)
        self.in_flight = isinstance(self.algorithm, SGP) and self.algorithm.overlap == 1

    def merge(self, index):
        same = [stages[index] for stages in self.replicas]
        mean = mean_of([stage.history[-1].weights() for stage in same])
        for stage in same:
            overwrite(stage.history[-1], mean)

    def step_outer(self, index):
        """Nesterov's momentum of 0.9 at a rate of 0.7, on what the replicas have learned."""
        same = [stages[index] for stages in self.replicas]
        mean = mean_of([stage.history[-1].weights() for stage in same])
        slow, velocity = self.slow[index], self.velocity[index]
        for name, value in mean.items():
            gradient = slow[name] - value
            velocity[name] = 0.9 * velocity.get(name, 0) + gradient
            slow[name] = slow[name] - 0.7 * (gradient + 0.9 * velocity[name])
        for stage in same:
            overwrite(stage.history[-1], slow)


AXES = STREAMING, ALGORITHMS, ("momentum", "AdamW", "fused AdamW")
REPEATING = [  # the last update, in which there must be no merge
    PipeOptim("consistent", LastUpdate()),
    PipeOptim("live", LastUpdate()),
    PipeDream2BW(prediction=LastUpdate()),
]
REPEATED = [
    *product(REPEATING, [SGP(Complete(2)), *ALGORITHMS[1:]], ("momentum", "AdamW")),
    *product(STREAMING[:2], ALGORITHMS, ("Muon", "Lion")),
]
WIDE = [*STREAMING, PipeDream()], ALGORITHMS, ("momentum", "AdamW")  # no fused step takes it


@smooth_muon()
@pytest.mark.parametrize(
    ("cases", "depth", "dtype"),
    [
        ([*product(STREAMING[::3], ALGORITHMS[1:], ["fused AdamW"])], 2, torch.float32),
        (pairwise(*WIDE)[::2], 2, torch.float64),
        (REPEATED[4::14], 2, torch.float64),
        nightly(REPEATED, 2, torch.float64),
        nightly([*product(*AXES)], 2, torch.float32),
        slow(pairwise(*AXES), 3, torch.float32),
        slow(pairwise(*WIDE)[1::2], 2, torch.float64),
        nightly([*product(*WIDE)], 3, torch.float64),
    ],
    ids=["fused", "float64", "repeat", "repeats", "all", "pairs-3", "float64-others", "float64-3"],
)
def test_equals_a_full_history_of_every_replica(ranks, subtests, cases, depth, dtype):
    rows, most = (
        [(*case, depth, dtype) for case in cases],
        1e-5 if dtype == torch.float32 else 1e-12,
    )
    for row, found in zip(
        rows, ranks.run_each(2 * depth, gossip, rows, time_limit=300), strict=True
    ):
        schedule, algorithm, optimizer, *_ = row
        reference = Reference(schedule, algorithm, optimizer.removeprefix("fused "), depth, dtype)
        calls = [calls_of(replica, dtype=dtype) for replica in range(2)]
        expected = reference.train([[each[:4] for each in calls], [each[4:] for each in calls]])
        with subtests.test(str(row)):
            for rank, (losses, state) in enumerate(found):
                replica, stage = divmod(rank, depth)
                weights = reference.replicas[replica][stage].history[-1].weights()
                for name, value in weights.items():
                    torch.testing.assert_close(state[name], value, rtol=0, atol=most)
                if stage == depth - 1:
                    of_steps = torch.tensor(expected[replica], dtype=dtype).view(-1, MICROBATCHES)
                    ours = torch.tensor(losses, dtype=dtype)
                    torch.testing.assert_close(ours, of_steps.mean(1), rtol=0, atol=most)


def train_tied(rank, shape, schedule, algorithm):
    """Return the embedding and its tied head's weight, own and averaged, where they are."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "stage"))
    replica = mesh.get_local_rank("replicate")
    torch.manual_seed(replica)  # all begin with the first replica's
    layers = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 8))
    layers[3].weight = layers[0].weight
    trainer = PipelineTrainer(
        layers, cross_entropy, OURS["AdamW"], schedule, mesh=mesh, replicas=algorithm,
        num_microbatches=MICROBATCHES, split=[2][: shape[1] - 1],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(10 + replica)
    for ids in torch.randint(8, (5, 12), generator=generator):
        trainer.step(ids, target=ids.roll(1))
    weights = [layers[0].weight, layers[3].weight]
    found = [each.detach().clone() for each in weights]
    with trainer.consensus():
        trainer.evaluate(ids, target=ids)  # the head's is the embedding's
        found += [each.detach().clone() for each in weights]
        whole = trainer.full_state_dict()
    return found + [each.detach().clone() for each in weights], whole


@pytest.mark.slow
def test_tied_weights_are_merged_where_they_are_updated(ranks, subtests):
    algorithms = [AllReduce(), *ALGORITHMS[1:], SGP(Ring(2), compressor=Int8())]
    cases = [(GPipe(), each) for each in algorithms]
    alone = ranks.run_each(2, train_tied, [((2, 1), *case) for case in cases])
    split = ranks.run_each(4, train_tied, [((2, 2), *case) for case in cases])
    for case, expected, found in zip(cases, alone, split, strict=True):
        with subtests.test(str(case[1])):
            for replica, (tensors, whole) in enumerate(expected):
                (of_first, found_whole), (of_last, _) = found[2 * replica : 2 * replica + 2]
                assert whole.keys() == found_whole.keys()
                for index in range(0, len(tensors), 2):
                    embedding, head = of_first[index], of_last[index + 1]
                    assert torch.equal(embedding, head)
                    torch.testing.assert_close(head, tensors[index], rtol=0, atol=1e-5)


def train_by(rank, schedule, name):
    """Return the held-out losses before and after training, of the average."""
    trainer, replica = make((2, 2), schedule, EVERY_ALGORITHM[name](2), "AdamW")
    losses = [trainer.evaluate(*calls_of(0)[0])]
    for call in 4 * calls_of(replica):
        trainer.step(*call)
    with trainer.consensus():
        losses.append(trainer.evaluate(*calls_of(0)[0]))
        return losses, state_of(trainer)


@pytest.mark.slow
def test_replicas_train_by_every_algorithm(ranks, subtests):
    place = place_of_replicas(GPipe(), 2)
    names = [name for name, make in EVERY_ALGORITHM.items() if not make(2).error_at(place)]
    assert len(names) > 18
    for schedule, name in product((GPipe(), STREAMING[0]), names):
        if name == "allreduce" and not schedule.flushes:
            continue
        with subtests.test(f"{name} {schedule}"):
            found = ranks.run(4, train_by, schedule, name)
            before, after = found[1][0]
            assert after < 0.8 * before or name == "osgp-biased"  # the paper's ablation
            for (_, first), (_, second) in zip(found[:2], found[2:], strict=True):
                assert all(torch.equal(each, second[key]) for key, each in first.items())


def one_replica(rank, schedule, has_mesh):
    options = {}
    if has_mesh:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "stage"))
        algorithm = AllReduce() if schedule.flushes else SGP(Complete(1))
        options = {"mesh": mesh, "replicas": algorithm}
    trainer = PipelineTrainer(
        build_layers(), mse_loss, OURS["fused AdamW"], schedule,
        num_microbatches=MICROBATCHES, split=SPLITS[2], max_norm=1.0, **options,
    )  # fmt: skip
    losses = [trainer.step(*call) for call in calls_of(0)]
    trainer.flush()
    return losses, state_of(trainer)


@pytest.mark.slow
def test_one_replica_is_the_pipeline_alone_bit_for_bit(ranks):
    cases = [(schedule, has) for schedule in FLUSHING + STREAMING for has in (True, False)]
    found = ranks.run_each(2, one_replica, cases)
    for with_mesh, alone in zip(found[::2], found[1::2], strict=True):
        for (losses, state), (own_losses, own_state) in zip(with_mesh, alone, strict=True):
            assert repr(losses) == repr(own_losses)  # of which one may be nan, not known yet
            assert all(torch.equal(state[name], each) for name, each in own_state.items())


def one_stage(rank, algorithm, optimizer):
    trainer, replica = make((2, 1), GPipe(), algorithm, optimizer)
    model = nn.Sequential(*build_layers())
    plain = OURS[optimizer](list(model.parameters()))
    wrapped = GossipDataParallel(model, plain, algorithm)
    for inputs, target in calls_of(replica):
        trainer.step(inputs, target)
        plain.zero_grad()
        for part in zip(*(each.chunk(MICROBATCHES) for each in (inputs, target)), strict=True):
            with wrapped.no_sync():
                (mse_loss(model(part[0]), part[1]) / MICROBATCHES).backward()
        wrapped(inputs[:1])  # a step without a forward of the wrapper is a repetition
        plain.step()
    trainer.flush()
    wrapped.flush()
    state, expected = state_of(trainer), model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_one_stage_is_plain_gossip_bit_for_bit(ranks):
    ranks.run_each(2, one_stage, pairwise(ALGORITHMS, ("momentum", "fused AdamW")))


def resume(rank, schedule, algorithm):
    trainer, replica = make((2, 2), schedule, algorithm, "fused AdamW")
    calls = calls_of(replica)
    for call in calls[:3]:
        trainer.step(*call)
    trainer.flush()
    saved = io.BytesIO()
    torch.save(trainer.state_dict(), saved)
    saved.seek(0)
    for call in calls[3:]:
        trainer.step(*call)
    trainer.flush()
    expected = state_of(trainer)
    trainer.close()
    again, _ = make((2, 2), schedule, algorithm, "fused AdamW")
    again.load_state_dict(torch.load(saved))
    for call in calls[3:]:
        again.step(*call)
    again.flush()
    assert all(torch.equal(each, expected[name]) for name, each in state_of(again).items())


@pytest.mark.slow
def test_resumes_bit_for_bit(ranks):
    cases = [*pairwise((GPipe(), STREAMING[0]), ALGORITHMS[1:]), (GPipe(), AllReduce())]
    ranks.run_each(4, resume, cases)


def rescue(rank, algorithm):
    """Replicas that have diverged go on from the first one."""
    trainer, replica = make((2, 2), GPipe(), algorithm)
    for call in calls_of(replica)[:2]:
        trainer.step(*call)
    trainer.flush()
    saved, first = trainer.rescue_state_dict(), state_of(trainer)
    objects = [None, None]
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))["replicate"]
    dist.all_gather_object(objects, first, group=group.get_group())
    with pytest.raises(
        RuntimeError, match=r"^sharded_state_dict\(\) must be called inside consensu"
    ):
        trainer.sharded_state_dict()
    trainer.close()
    again, _ = make((2, 2), GPipe(), algorithm)
    again.load_state_dict(saved)
    assert all(torch.equal(each, objects[0][name]) for name, each in state_of(again).items())
    again.step(*calls_of(replica)[2])


@pytest.mark.slow
def test_a_rescued_state_is_that_of_the_first_replica(ranks):
    ranks.run_each(4, rescue, [(SGP(Ring(2), overlap=1),), (DiLoCo(3),)])


def save_sharded(rank, folder, algorithm):
    trainer, replica = make((2, 2), GPipe(), algorithm, "AdamW")
    for call in calls_of(replica)[:3]:
        trainer.step(*call)
    with trainer.consensus():
        dcp.save(trainer.sharded_state_dict(), checkpoint_id=folder)
        return trainer.full_state_dict()


def load_sharded(rank, folder, shape):
    trainer, replica = make(shape, STREAMING[0], SGP(Ring(shape[0]), overlap=1), "AdamW")
    trainer.load_checkpoint(folder)
    steps = {int(each["step"]) for each in trainer.stages[0].optimizers[0].state.values()}
    with trainer.consensus():
        whole = trainer.full_state_dict()
    trainer.step(*calls_of(replica)[3])
    if rank == 0:
        with pytest.raises(RuntimeError, match="must be called after flush"):
            trainer.sharded_state_dict()
    trainer.flush()
    return whole, steps


def lose_checkpoint(rank, folder):
    trainer, replica = make((2, 2), GPipe(), SGP(Ring(2)), "AdamW")
    with pytest.raises(ValueError, match=r"^ranks 2-3: checkpoint_id must be a folder"):
        trainer.load_checkpoint(folder if replica == 0 else f"{folder}-none")
    trainer.step(*calls_of(replica)[0])


@pytest.mark.slow
def test_a_sharded_state_is_the_average_and_loads_elsewhere(ranks, tmp_path):
    for index, algorithm in enumerate([SGP(Ring(2), overlap=1), AllReduce()]):
        folder = str(tmp_path / str(index))
        average, *others = ranks.run(4, save_sharded, folder, algorithm)
        assert not others[0]
        for shape in ((3, 1), (1, 3)) if index == 0 else ((2, 2),):
            found = ranks.run(shape[0] * shape[1], load_sharded, folder, shape)
            assert all(steps == {3} for _, steps in found)
            for whole, _ in found[:: shape[1]]:
                torch.testing.assert_close(whole, average, rtol=0, atol=1e-6)
    ranks.run(4, lose_checkpoint, folder)


def evaluate_average(rank):
    trainer, replica = make((2, 2), STREAMING[0], SGP(Ring(2), overlap=1), has_statistics=True)
    for call in calls_of(replica):
        trainer.step(*call)
    trainer.flush()
    own, (stage,) = state_of(trainer), trainer.stages
    message = stage.replicated.averager.buffers[0].nbytes + 64  # and a header
    sent = trainer.metrics()["rank/bytes_sent_to_replicas"]
    assert sent == stage.num_updates * message
    with trainer.consensus():
        inside, loss = state_of(trainer), trainer.evaluate(*calls_of(0)[0])
        whole = trainer.full_state_dict()
    assert all(torch.equal(each, own[name]) for name, each in state_of(trainer).items())
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, (own, inside, loss, whole))
    if rank == 0:
        for stage in range(2):
            (first, inside, *_), (second, other, *_) = everywhere[stage::2]
            for name, value in inside.items():
                assert torch.equal(value, other[name])
                if value.is_floating_point():
                    torch.testing.assert_close(value, (first[name] + second[name]) / 2)
        losses = [loss for _, _, loss, _ in everywhere]
        assert len(set(losses)) == 1
        wholes = [each[3] for each in everywhere]
        assert all(torch.equal(wholes[0][name], wholes[2][name]) for name in wholes[0])
        assert wholes[0]
        assert not wholes[1]


def test_consensus_is_the_average_of_the_replicas(ranks):
    ranks.run(4, evaluate_average)


def refuse(rank, policy):
    """The third batch of replica 0 has a nan in its target."""
    trainer, replica = make((2, 2), GPipe(), AllReduce(), nonfinite=policy)
    errors = []
    for index, (inputs, target) in enumerate(calls_of(replica)):
        before = state_of(trainer)
        spoils = float("nan") if (replica, index) == (0, 2) else 1.0
        try:
            trainer.step(inputs, spoils * target)
        except NonFiniteError as error:
            errors.append((index, str(error)))
        is_equal = all(torch.equal(each, before[name]) for name, each in state_of(trainer).items())
        assert is_equal == (index == 2)
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, errors)
    assert everywhere == [errors] * 4, everywhere
    if policy == "skip":
        assert not errors
    else:
        ((index, text),) = errors
        assert index == 2
        assert text.startswith("replica 0, rank 1, step 2: ")


def test_what_one_replica_skips_all_do(ranks):
    ranks.run_each(4, refuse, [("raise",), ("skip",)])


def freeze(rank, algorithm):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))
    torch.manual_seed(mesh.get_local_rank("replicate"))
    layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layers[:2].requires_grad_(False)
    trainer = PipelineTrainer(
        layers, mse_loss, OURS["momentum"], GPipe(), mesh=mesh, replicas=algorithm,
        num_microbatches=MICROBATCHES, split=[2],
    )  # fmt: skip
    begun = state_of(trainer)
    trainer.step(torch.randn(6, 6), target=torch.randn(6, 2))
    return begun


def test_a_frozen_stage_begins_as_in_the_first_replica(ranks):
    for found in ranks.run_each(4, freeze, [(AllReduce(),), (SGP(Ring(2), overlap=1),)]):
        for first, second in zip(found[:2], found[2:], strict=True):
            assert all(torch.equal(each, second[name]) for name, each in first.items())


def skip_alone(rank, schedule):
    """The third batch of replica 0 has a nan: it takes the round without an update."""
    trainer, replica = make((2, 2), schedule, SGP(Complete(2)), nonfinite="skip")
    for index, (inputs, target) in enumerate(calls_of(replica)):
        spoils = float("nan") if (replica, index) == (0, 2) else 1.0
        trainer.step(inputs, spoils * target)
    trainer.flush()
    return trainer.stages[0].num_skipped, state_of(trainer)


def test_a_replica_that_skips_an_update_takes_its_round(ranks):
    for schedule in GPipe(), STREAMING[0]:
        found = ranks.run(4, skip_alone, schedule)
        each = 1 if schedule.flushes else MICROBATCHES
        assert [skipped for skipped, _ in found] == [each, each, 0, 0]
        for stage in range(2):
            (_, first), (_, second) = found[stage::2]
            for name, value in first.items():
                torch.testing.assert_close(value, second[name], rtol=0, atol=1e-6)


MESH = partial(init_device_mesh, "cpu", mesh_dim_names=("replicate", "stage"))
FIX = (
    '; pass mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "stage")) and '
    "replicas=AllReduce() or a gossip algorithm"
)
TAKE = "take a gossip algorithm such as SGP, or a schedule that flushes"
MISTAKES = [  # schedule, mesh, replicas, group, perhaps split of a rank; the sentence
    (lambda rank: (GPipe(), MESH((2, 2)), None, None),
     f"mesh and replicas must be given together, got mesh alone{FIX}"),
    (lambda rank: (GPipe(), None, AllReduce(), None),
     f"mesh and replicas must be given together, got replicas alone{FIX}"),
    (lambda rank: (GPipe(), MESH((2, 1)), AllReduce(), None),
     "mesh must have all 4 ranks, got 2"),
    (lambda rank: (GPipe(), MESH((2, 2)), AllReduce(), None, [6 - rank // 2]),
     "all ranks must have the same split, got [6] on rank 0 and [5] on rank 2"),
    (lambda rank: (GPipe(), init_device_mesh("cpu", (2, 2)), AllReduce(), None),
     'mesh must have the dimensions "replicate" and "stage", got an empty tuple'),
    (lambda rank: (GPipe(), MESH((2, 2)), AllReduce(), dist.group.WORLD),
     "process_group must be None with mesh, whose group it is, got "),
    (lambda rank: (GPipe(), MESH((2, 2)), AllReduce, None),
     "replicas must be an object such as AllReduce() or SGP(), got the class AllReduce"),
    (lambda rank: (GPipe(), "2 x 2", AllReduce(), None),
     'mesh must be a DeviceMesh with the dimensions "replicate" and "stage", got \'2 x 2\''),
    (lambda rank: (PipeOptim(), MESH((2, 2)), AllReduce(), None),
     "replicas must average weights with PipeOptim, whose updates no rank waits for, got "
     f"AllReduce(find_unused_parameters=False): {TAKE}"),
    (lambda rank: (GPipe(), MESH((2, 2)), LeaderSGD(2, interval=2, global_interval=4), None),
     "replicas must average without losses, which one stage knows, got LeaderSGD("),
    (lambda rank: (GPipe(), MESH((2, 2)), Hierarchical(SGP(), 2), None),
     "replicas must average weights or gradients, not both, got Hierarchical("),
    (lambda rank: (GPipe(), MESH((2, 2)), SGP(Ring(4)), None),
     "replicas must be for the mesh's 2: topology must be for the process group's 2 ranks, got "
     "Ring(4); leave it out for OnePeerExponential(2, peers=1)"),
    (lambda rank: (GPipe(), MESH((2, 2)), SGP(Ring(2), overlap=rank // 2), None),
     "all ranks must have the same replicas: algorithm, got SGP(topology=Ring(2), overlap=0, "
     "compressor=None) on rank 0 and SGP(topology=Ring(2), overlap=1, compressor=None) on rank 2"),
    (lambda rank: ([GPipe(), OneForwardOneBackward()][rank // 2], MESH((2, 2)), AllReduce(), None),
     "all ranks must have the same schedule, got GPipe() on rank 0 and "
     "OneForwardOneBackward() on rank 2"),
]  # fmt: skip


def mistake(rank, index):
    schedule, mesh, replicas, group, *splits = MISTAKES[index][0](rank)
    with pytest.raises((ValueError, TypeError)) as error:
        PipelineTrainer(
            build_layers(), mse_loss, OURS["momentum"], schedule, mesh=mesh, replicas=replicas,
            process_group=group, num_microbatches=3, split=splits[0] if splits else [6],
        )  # fmt: skip
    return str(error.value)


def test_mistakes_are_one_sentence_on_all_ranks(ranks, subtests):
    for index, found in enumerate(ranks.run_each(4, mistake, [(i,) for i in range(len(MISTAKES))])):
        with subtests.test(MISTAKES[index][1]):
            assert found[0] == found[1] == found[2] == found[3]
            assert MISTAKES[index][1] in found[0]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def lose(rank, num_ranks, schedule, algorithm):
    """Rank 3, the last stage of the second replica, is killed in its third update."""
    trainer, replica = make((2, 2), schedule, algorithm)
    errors = []
    for index, call in enumerate(calls_of(replica)):
        if (rank, index) == (3, 2):
            trainer.stages[0].optimizers[0].register_step_pre_hook(die)
        try:
            trainer.step(*call)
        except StageError as error:
            errors.append(str(error))
            break
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [slow((GPipe(), AllReduce())), (STREAMING[0], SGP(Ring(2), overlap=1))], ids=str
)
def test_a_dead_rank_is_named_in_all_replicas(case):
    *others, dead = observe_ranks(4, lose, 4, *case, group_timeout=20)
    assert dead.exit_code == -signal.SIGKILL
    assert [each.error for each in others] == [None] * 3, others
    (text,) = {each.value[0] for each in others}
    # By the rank that has found it out first, of either replica.
    names = "replica 1, rank 1 (stage 1)", "rank 3 of another replica"
    assert text.startswith(tuple(f"{name} died" for name in names))
    assert re.search(r": replica \d, rank \d waited for ", text)
