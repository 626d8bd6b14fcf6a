"""What a rank reports of itself: checked by the simulator, the unsplit model, and known delays."""

import json
import math
import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.comm import NonFiniteError
from pyparallel.pipeline import (
    GPipe,
    Interleaved,
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipeDream2BW,
    PipelineShape,
    PipelineTrainer,
    PipeOptim,
    ZeroBubble,
)
from pyparallel.planning.pipelines import simulate

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


NUM_RANKS, NUM_MICROBATCHES, STEPS = 3, 4, 3
SCHEDULES = [
    OneForwardOneBackward(), Interleaved(), ZeroBubble(), PipeOptim(), PipeDream2BW(),
]  # fmt: skip
RTOL = 1e-5  # of float32 and its sums over microbatches
DELAY = 0.05  # seconds of each forward of stage 0


def build_layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, 4, generator=generator) for _ in range(2))


def build(schedule, **options):
    num_stages = NUM_RANKS * (2 if isinstance(schedule, Interleaved) else 1)
    every = 6 // num_stages
    return PipelineTrainer(
        build_layers(), mse_loss, sgd, schedule, num_microbatches=NUM_MICROBATCHES,
        split=range(every, 6, every), **options,
    )  # fmt: skip


def follow(rank, schedule, folder):
    """Return the metrics of every step and of the flush, the losses, and the spans of all."""
    trainer = build(schedule, measure_gradient_norms=True)
    before, found, losses, spans = trainer.metrics(), [], [], []
    for step in range(STEPS):
        losses.append(trainer.step(*batch_of(step)))
        found.append(trainer.metrics())
        spans += trainer.spans
    trainer.flush()
    found.append(trainer.metrics())
    if trainer.spans != spans[-len(trainer.spans) :]:  # a schedule that flushes has none left
        spans += trainer.spans
    trainer.export_chrome_trace(f"{folder}/{type(schedule).__name__}.json", spans)
    trainer.evaluate(*batch_of(0))  # whose forwards are of no update
    trainer.step(*batch_of(3))
    return before, found, losses, trainer.metrics(), spans


def clip(rank):
    """Return the norms of a step whose gradients are clipped."""
    trainer = build(OneForwardOneBackward(), max_norm=1e-3, measure_gradient_norms=True)
    trainer.step(*batch_of(0))
    return trainer.metrics()


def skip(rank):
    """Return what is reported after a loss that is not finite."""
    trainer = build(OneForwardOneBackward(), measure_gradient_norms=True)
    inputs, target = batch_of(0)
    with pytest.raises(NonFiniteError):
        trainer.step(inputs * math.nan, target)
    return trainer.metrics()


def delay(rank):
    """Return what is reported with a slow first stage."""
    trainer = build(GPipe())
    trainer.step(*batch_of(0))
    if rank == 0:
        trainer.stages[0].module.register_forward_hook(lambda *_: time.sleep(DELAY))
    trainer.step(*batch_of(1))
    return trainer.metrics()


def interlock(rank):
    trainer = PipelineTrainer(
        [nn.Linear(4, 4) for _ in range(3)], mse_loss, sgd, Interlocking(2, LinearHead(4)),
        num_microbatches=NUM_MICROBATCHES, split=[1, 2],
    )  # fmt: skip
    unbuilt = trainer.metrics()
    batch = torch.ones(8, 4)
    for _ in range(2):
        trainer.step(batch, batch)
    found = trainer.metrics()
    trainer.flush()
    return unbuilt, found, trainer.metrics()


def work(rank, folder):
    followed = [follow(rank, schedule, folder) for schedule in SCHEDULES]
    return followed, clip(rank), skip(rank), delay(rank), interlock(rank)


@pytest.fixture(scope="module")
def results(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    by_rank = ranks.run(NUM_RANKS, work, str(folder))
    return folder, *zip(*by_rank, strict=True)


def merged(dicts):
    return {key: value for each in dicts for key, value in each.items()}


def gradient_norms(step_batches):
    """Return the norm of each layer's gradient in the last of some steps of the unsplit model."""
    layers = build_layers().double()
    optimizer = sgd(layers.parameters())
    for inputs, target in step_batches:
        optimizer.zero_grad()
        mse_loss(layers(inputs.double()), target.double()).backward()
        norms = [
            torch.stack([p.grad.norm() for p in layer.parameters()]).norm().item()
            for layer in layers
        ]
        optimizer.step()
    return norms


def test_versions_and_staleness_are_those_of_the_simulator(results, subtests):
    _, followed, *_ = results
    for index, schedule in enumerate(SCHEDULES):
        with subtests.test(repr(schedule)):
            ranks = [each[index] for each in followed]
            num_stages = 6 if isinstance(schedule, Interleaved) else 3
            actions = schedule.actions(num_stages, NUM_MICROBATCHES, NUM_RANKS, STEPS)
            spans = [span for *_, own in ranks for span in own]
            assert [span.action for span in spans] == [a for rank in actions for a in rank]
            shape = PipelineShape(num_stages, NUM_MICROBATCHES, NUM_RANKS)
            weights = simulate(actions, versions=schedule.versions(shape)).weights
            assert [span.weights.version for span in spans] == weights.version.tolist()
            assert [span.weights.horizon for span in spans] == weights.horizon.tolist()
            reported = merged(each[1][-2] for each in ranks)  # of a step with a full pipeline
            for stage in range(num_stages):
                wanted = schedule.delay(shape, stage)
                assert reported[f"stage{stage}/staleness"] == wanted
                predicted = wanted if schedule == PipeOptim() else 0
                assert reported[f"stage{stage}/prediction_horizon"] == predicted


def test_counts_bytes_and_losses_are_those_that_were(results, subtests):
    _, followed, *_ = results
    for index, schedule in enumerate(SCHEDULES):
        with subtests.test(repr(schedule)):
            ranks = [each[index] for each in followed]
            for before, found, losses, after, _ in ranks:
                assert all(isinstance(each, float) for each in after.values())
                assert all(
                    value == 0.0
                    for key, value in before.items()
                    if "peak" not in key and "bytes" not in key
                )
                reported = [each["loss"] for each in found[:STEPS]]
                assert reported == pytest.approx(losses, rel=0, nan_ok=True)
                assert after["rank/waiting_seconds"] == pytest.approx(
                    sum(
                        after[f"rank/waiting_for_{what}_seconds"]
                        for what in ("activations", "gradients", "ranks")
                    )
                )
                busy = [value for key, value in after.items() if key.endswith("/busy_seconds")]
                assert after["rank/busy_seconds"] * 2 == pytest.approx(sum(busy))
            ends = [found[-1] for _, found, *_ in ranks]
            sent, received = (
                sum(each[f"rank/bytes_{way}"] for each in ends) for way in ("sent", "received")
            )
            assert sent == received > 0
            updates = {v for each in ends for k, v in each.items() if k.endswith("/updates")}
            per_step = NUM_MICROBATCHES if schedule == PipeOptim() else 1
            assert updates == {STEPS * per_step}


def test_norms_are_those_of_the_unsplit_model(results):
    _, followed, clipped, *_ = results
    for index, schedule in enumerate(SCHEDULES[:3]):  # those that flush
        reported = merged(each[index][1][STEPS - 1] for each in followed)
        layers = gradient_norms([batch_of(step) for step in range(STEPS)])
        num_stages = 6 if isinstance(schedule, Interleaved) else 3
        every = 6 // num_stages
        for stage in range(num_stages):
            own = math.hypot(*layers[every * stage : every * (stage + 1)])
            assert reported[f"stage{stage}/gradient_norm"] == pytest.approx(own, rel=RTOL)
    layers = gradient_norms([batch_of(0)])
    for stage in range(3):
        own = math.hypot(*layers[2 * stage : 2 * stage + 2])
        assert merged(clipped)[f"stage{stage}/gradient_norm"] == pytest.approx(own, rel=RTOL)


def test_a_skipped_update_is_counted(results):
    for stage, found in enumerate(results[3]):
        assert found[f"stage{stage}/skipped_updates"] == 1
        assert found[f"stage{stage}/updates"] == 0
        assert f"stage{stage}/gradient_norm" not in found
        assert "loss" not in found


def test_waits_are_told_apart(results):
    first, second, third = results[4]
    seconds = NUM_MICROBATCHES * DELAY
    assert first["stage0/busy_seconds"] >= seconds
    assert first["rank/waiting_for_activations_seconds"] == 0
    for each in (second, third):
        assert each["rank/waiting_for_activations_seconds"] > 0.8 * seconds
        assert each["rank/busy_seconds"] < seconds
    assert third["rank/waiting_for_gradients_seconds"] == 0


def test_interlocking_stages_are_measured(results):
    for rank, (unbuilt, found, flushed) in enumerate(results[5]):
        assert unbuilt == {}
        assert found[f"stage{rank}/busy_seconds"] > 0
        assert flushed[f"stage{rank}/updates"] == 2  # one a step
        assert found[f"stage{rank}/prediction_horizon"] == 0


def test_the_trace_has_every_action_of_every_rank(results):
    folder, followed, *_ = results
    for index, schedule in enumerate(SCHEDULES):
        path = folder / f"{type(schedule).__name__}.json"
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        for rank in range(NUM_RANKS):
            own = sorted((e for e in events if e["pid"] == rank), key=lambda e: e["ts"])
            spans = followed[rank][index][-1]
            actions = [e["args"]["action"] for e in own if e["cat"] == "action"]
            assert actions == [str(span.action) for span in spans]
            for event, after in pairwise(own):  # a rank does one thing at a time
                assert event["ts"] + event["dur"] <= after["ts"] + 0.1  # microseconds, rounded
        assert any(e["cat"] == "wait" for e in events)


def test_a_single_process_measures_itself(tmp_path):
    trainer = build(PipeOptim())
    for step in range(2):  # the pipeline is full in the second
        trainer.step(*batch_of(step))
    found = trainer.metrics()
    assert found["rank/bytes_sent"] == found["rank/waiting_seconds"] == 0
    assert found["stage0/staleness"] == 2
    trainer.export_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(trainer.spans)
