"""ResNets cut by one rule: training, memory and traffic of the ranks."""

import pytest
import torch
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.subnets import Hidden, Partition
from tests.subnets.helpers.masked import Momentum, train_together
from tests.subnets.helpers.resnet import Basic, Bottleneck, resnet18, resnet50

FIRST = Hidden("conv1", "conv2", norms="bn1")
SECOND = Hidden("conv2", "conv3", norms="bn2")
RULE = Momentum(0.01, 0.9)
WIDTH = 4  # of the first layer's channels; the paper has 64
CASES = {
    "ResNet-18": (resnet18, Partition({"layer?.*": FIRST}, seed=1), 8),
    "ResNet-50": (resnet50, Partition({"layer?.*": (FIRST, SECOND)}, seed=1), 2 * 16),
}


def build(name):
    torch.manual_seed(0)
    make, partition, _ = CASES[name]
    model = make(WIDTH, num_classes=3).double()
    for block in model.modules():  # near the identity: rounding must not grow from step to step
        if isinstance(block, (Basic, Bottleneck)):
            nn.init.constant_((block.bn2 if isinstance(block, Basic) else block.bn3).weight, 0.1)
    return model, partition


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(4, 3, generator=generator, dtype=torch.float64)


def layout_of(model, cut_dims):
    """Return where hidden dimensions lie, by layer, from the names of ResNet's modules."""
    cut = [cut_dim.name for cut_dim in cut_dims]
    layout = {name: [None, 1, None] for name, _ in model.named_modules()}
    for name in cut:
        block, _, conv = name.rpartition(".")
        number = int(conv.removeprefix("conv"))
        layout[name][0] = layout[f"{block}.bn{number}"][0] = name
        layout[f"{block}.conv{number + 1}"][2] = name
    return {name: tuple(dims) for name, dims in layout.items() if dims != [None, 1, None]}


def train(rank, name, steps, interval):
    model, partition = build(name)
    trainer = SubnetTrainer(model, RULE.make, partition, interval)
    held = {key: p.numel() for key, p in trainer.subnet.named_parameters()}
    for step in range(steps):
        inputs, targets = batch_of(step, rank)
        trainer.optimizer.zero_grad()
        nn.functional.mse_loss(trainer(inputs), targets).backward()
        trainer.optimizer.step()
    trainer.flush()
    with trainer.full_model() as module:
        return {key: p.detach().clone() for key, p in module.named_parameters()}, held


def train_all(rank):
    return {name: train(rank, name, 3, 2) for name in CASES}


@pytest.fixture(scope="module")
def outcomes(ranks):
    return ranks.run(2, train_all, time_limit=120)


def test_one_rule_cuts_every_block(subtests):
    for name in CASES:
        with subtests.test(str(name)):
            model, partition = build(name)
            assert len(partition.cut_dims(model)) == CASES[name][2]


@pytest.mark.parametrize("name", CASES)
def test_training_equals_masked_training_of_the_full_model(name, outcomes):
    model, partition = build(name)
    cut_dims = partition.cut_dims(model)
    draws = [partition.draw(cut_dims, round_index, 2) for round_index in range(2)]
    batches = [[batch_of(step, rank) for rank in range(2)] for step in range(3)]
    train_together(model, layout_of(model, cut_dims), draws, batches, 2, RULE)
    for found, _ in (rank[name] for rank in outcomes):
        for key, wanted in model.named_parameters():
            torch.testing.assert_close(found[key], wanted, rtol=1e-9, atol=1e-11)
