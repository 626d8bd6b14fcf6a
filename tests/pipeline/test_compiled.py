"""Compiled layers under every schedule, against the reference of the layers as they are."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import GPipe, PipelineTrainer, PipeMare, Schedule, ZeroBubble
from tests.pipeline import reference
from tests.pipeline.jobs import DEEP, IN_ANY_DTYPE, Trained, train, train_on
from tests.pipeline.models import OPTIMIZERS, SPLITS, build_calls, build_layers

STREAMS = [build_calls(3, 12), build_calls(1, 12)]
SGD = OPTIMIZERS["momentum"]
# Inductor compiles to C++, which takes long.
BACKENDS = {"aot_eager": IN_ANY_DTYPE, "inductor": [ZeroBubble(), PipeMare()]}


def compile_layers(backend: str) -> list[nn.Module]:
    return [torch.compile(layer, backend=backend) for layer in build_layers()]


def train_compiled(schedule: Schedule, num_stages: int, backend: str) -> Trained:
    torch.compiler.reset()
    return train(schedule, compile_layers(backend), SPLITS[num_stages], SGD, STREAMS)


def expected(schedule: Schedule) -> reference.Trained:
    return reference.train_in_one_process(
        build_layers, SPLITS[4], mse_loss, SGD, schedule, STREAMS, 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_train_like_the_reference(backend, ranks, subtests):
    schedules = BACKENDS[backend]
    trained = train_on(ranks, DEEP, partial(train_compiled, backend=backend), schedules)
    for schedule, found in zip(schedules, trained, strict=True):
        with subtests.test(schedule=schedule):
            state = {k.replace("_orig_mod.", ""): v for k, v in found.state.items()}
            wanted = expected(schedule)
            assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
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
