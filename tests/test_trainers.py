"""What a trainer refuses is one sentence, the same from all of them: copies, use after close()."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel, PipelineTrainer, SubnetTrainer
from pyparallel.gossip import SGP
from pyparallel.gossip.topology import Ring
from pyparallel.pipeline import GPipe, PipeOptim
from pyparallel.subnets import Partition

INPUTS, TARGET = torch.ones(4, 3), torch.ones(4, 2)
ONE = (
    r"an optimizer must be stepped by one trainer, got SGD, which a \w+ steps: close\(\) that "
    "trainer first, or create another optimizer"
)


def build_module():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def gossip(module, optimizer):
    return GossipDataParallel(module, optimizer, SGP(Ring(1)))


def pipeline(module, optimizer, schedule=None):
    trainer = PipelineTrainer(
        module, nn.MSELoss(), lambda _: optimizer, schedule or GPipe(), num_microbatches=2
    )
    trainer.prepare(INPUTS, TARGET)
    return trainer


def streaming(module, optimizer):
    return pipeline(module, optimizer, PipeOptim())


def subnets(module, optimizer):
    def optimizer_fn(parameters):
        optimizer.param_groups[0]["params"] = parameters
        return optimizer

    return SubnetTrainer(module, optimizer_fn, Partition(), interval=2)


TRAINERS = {"gossip": gossip, "pipeline": pipeline, "streaming": streaming, "subnets": subnets}
CALLS = {
    GossipDataParallel: [
        lambda t: t(INPUTS),
        lambda t: t.metrics(),
        lambda t: t.flush(),
        lambda t: t.full_state_dict(),
        lambda t: t.algorithm_state_dict(),
    ],
    PipelineTrainer: [lambda t: t.step(INPUTS, TARGET)],  # others: pipeline/test_close.py
    SubnetTrainer: [
        lambda t: t(INPUTS),
        lambda t: t.flush(),
        lambda t: t.full_model().__enter__(),
        lambda t: t.full_state_dict(),
        lambda t: t.state_dict(),
        lambda t: t.metrics(),
    ],
}


def start(name, module=None, optimizer=None):
    module = module or build_module()
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = list(module.parameters())
    return TRAINERS[name](module, optimizer), module, optimizer


def rank_main(rank):
    """Return what each trainer says of a mistake, as (trainer, mistake, sentence)."""
    said = []

    def note(name, mistake, error):
        said.append((name, mistake, str(error)))

    for name in TRAINERS:
        trainer, _, optimizer = start(name)
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError) as caught:
                how(trainer)
            note(name, "copy", caught.value)
        for other in TRAINERS:
            with pytest.raises(ValueError, match=ONE) as caught:
                start(other, None, optimizer)
            note(other, "owner", caught.value)
        trainer.close()
        trainer.close()
        for call in CALLS[type(trainer)]:
            with pytest.raises(RuntimeError) as caught:
                call(trainer)
            note(name, "closed", caught.value)
    return said


def test_three_trainers_say_the_same(ranks):
    for name, mistake, sentence in ranks.run(1, rank_main)[0]:
        class_name = {"gossip": "GossipDataParallel", "subnets": "SubnetTrainer"}.get(
            name, "PipelineTrainer"
        )
        if mistake == "copy":
            assert sentence.startswith(f"{class_name} must not be copied or pickled: "), sentence
        if mistake == "closed":
            assert sentence == f"{class_name} must not be used after close()"


def frees_optimizers(rank):
    """A trainer that is closed, or gone, leaves its optimizer to another one."""
    for name in TRAINERS:
        trainer, _, optimizer = start(name)
        trainer.close()
        del trainer
        gc.collect()
        start(name, None, optimizer)
    return True


def test_a_closed_trainer_leaves_its_optimizer(ranks):
    assert ranks.run(1, frees_optimizers) == [True]
