"""Compiled layers under every schedule, against the reference of the layers as they are."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import (
    Displacement,
    GPipe,
    PipelineTrainer,
    PipeMare,
    Schedule,
    ZeroBubble,
)
from tests.pipeline import reference
from tests.pipeline.every_schedule import EVERY_SCHEDULE
from tests.pipeline.jobs import CORRECTED, PREDICTING, Trained, train
from tests.pipeline.models import OPTIMIZERS, SPLITS, build_calls, build_layers
from tests.pipeline.oracles import LastStep
from tests.workers import run_ranks

NUM_STAGES = 4
STREAMS = [build_calls(3, 12), build_calls(1, 12)]
SCHEDULES = [
    replace(each, prediction=Displacement(LastStep())) if isinstance(each, PREDICTING) else each
    for each in EVERY_SCHEDULE
    if each != CORRECTED
]
SGD = OPTIMIZERS["momentum"]
# Inductor compiles to C++, which takes long.
BACKENDS = {
    "aot_eager": SCHEDULES,
    "inductor": [each for each in SCHEDULES if each in (ZeroBubble(), PipeMare())],
}


def compile_layers(backend: str) -> list[nn.Module]:
    return [torch.compile(layer, backend=backend) for layer in build_layers()]


def train_all(rank: int, backend: str) -> list[Trained]:
    done = []
    for schedule in BACKENDS[backend]:
        torch.compiler.reset()
        layers = compile_layers(backend)
        done.append(train(schedule, layers, SPLITS[NUM_STAGES], SGD, STREAMS))
    return done


def expected(schedule: Schedule) -> reference.Trained:
    return reference.train_in_one_process(
        build_layers, SPLITS[NUM_STAGES], mse_loss, SGD, schedule, STREAMS, 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_train_like_the_reference(backend, subtests):
    ranks = run_ranks(NUM_STAGES, train_all, backend, time_limit=170)
    for index, schedule in enumerate(BACKENDS[backend]):
        with subtests.test(schedule=schedule):
            state = {k: v for rank in ranks for k, v in rank[index].state.items()}
            state = {k.replace("_orig_mod.", ""): v for k, v in state.items()}
            wanted = expected(schedule)
            assert ranks[-1][index].losses == pytest.approx(wanted.losses, rel=1e-12)
            torch.testing.assert_close(state, wanted.state, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler reads
def test_states_of_compiled_layers_have_plain_keys():
    layers = [torch.compile(layer, backend="eager") for layer in build_layers()]
    trainer = PipelineTrainer(layers, mse_loss, SGD, GPipe(), num_microbatches=4, split=[])
    trainer.step(*STREAMS[0][0])
    plain = nn.Sequential(*build_layers()).state_dict()
    full = trainer.full_state_dict()
    assert full.keys() == plain.keys() == trainer.state_dict()["0"]["module"].keys()
    assert any(not torch.equal(full[name], value) for name, value in plain.items())
