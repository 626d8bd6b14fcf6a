"""The end of a trainer: close(), copies that are refused, and optimizers with one trainer."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import GPipe, Interlocking, LinearHead, PipelineTrainer, PipeOptim

sgd = partial(torch.optim.SGD, lr=0.1)


BATCH = torch.ones(4, 3), torch.ones(4, 3)
CLOSED = "^PipelineTrainer must not be used after close\\(\\)$"
NEEDS_STAGES = {
    "step": lambda trainer: trainer.step(*BATCH),
    "evaluate": lambda trainer: trainer.evaluate(*BATCH),
    "predict": lambda trainer: trainer.predict(BATCH[0]),
    "prepare": lambda trainer: trainer.prepare(*BATCH),
    "flush": lambda trainer: trainer.flush(),
    "state_dict": lambda trainer: trainer.state_dict(),
    "rescue_state_dict": lambda trainer: trainer.rescue_state_dict(),
    "load_state_dict": lambda trainer: trainer.load_state_dict({}),
    "full_state_dict": lambda trainer: trainer.full_state_dict(),
    "sharded_state_dict": lambda trainer: trainer.sharded_state_dict(),
    "load_checkpoint": lambda trainer: trainer.load_checkpoint("nowhere"),
    "export_chrome_trace": lambda trainer: trainer.export_chrome_trace("nowhere"),
    "metrics": lambda trainer: trainer.metrics(),
    "stages": lambda trainer: trainer.stages,
    "spans": lambda trainer: trainer.spans,
    "bytes_sent": lambda trainer: trainer.bytes_sent,
}


def build(schedule, optimizer_fn=sgd, split=(1, 2), layers=None):
    layers = layers or [nn.Linear(3, 3) for _ in range(3)]
    return PipelineTrainer(
        layers, mse_loss, optimizer_fn, schedule, num_microbatches=2, split=split
    )


@pytest.mark.parametrize("schedule", [GPipe(), PipeOptim(), Interlocking(2, LinearHead(3))])
def test_nothing_but_close_is_called_after_close(schedule, subtests):
    trainer = build(schedule)
    trainer.step(*BATCH)
    for _ in range(2):
        trainer.close()
        for name, call in NEEDS_STAGES.items():
            with subtests.test(name), pytest.raises(RuntimeError, match=CLOSED):
                call(trainer)
    assert trainer.split == (1, 2)


def test_a_trainer_without_stages_is_closed_too():
    trainer = build(GPipe(), split=None)
    trainer.close()
    with pytest.raises(RuntimeError, match=CLOSED):
        trainer.prepare(*BATCH)


def test_the_layers_stay_with_the_last_update():
    layers = [nn.Linear(3, 3) for _ in range(3)]
    trainer, other = build(PipeOptim(), layers=layers), None
    trainer.step(*BATCH)
    weights = [p.clone() for layer in layers for p in layer.parameters()]
    trainer.close()
    del trainer
    gc.collect()
    assert all(map(torch.equal, weights, (p for layer in layers for p in layer.parameters())))
    other = build(GPipe(), layers=layers)
    assert other.step(*BATCH) > other.evaluate(*BATCH)


def test_a_trainer_is_in_no_reference_cycle():
    trainer = build(PipeOptim())
    trainer.step(*BATCH)
    trainer.flush()
    gone = weakref.ref(trainer)
    gc.disable()  # until a collection, process groups and their threads would live
    try:
        del trainer
        assert gone() is None
    finally:
        gc.enable()
