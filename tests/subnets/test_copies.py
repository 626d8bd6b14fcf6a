"""Subnets with copies: several ranks train each, and a merge averages them."""

import pytest
import torch
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.gossip.algorithms.periodic import local_sgd
from pyparallel.subnets import Averaged, Partition, Scaled
from tests.gossip.loops import error_of
from tests.subnets.helpers.masked import MLP_LAYOUT, AdamW, Momentum, smooth_mlp, train_together
from tests.subnets.helpers.training import batch_of, held, train

INTERVAL, STEPS, LR = 2, 7, 0.1
RULES = {"momentum": Momentum(LR, 0.9), "adamw": AdamW(0.01, 0.1)}
CASES = [(2, "momentum"), (2, "adamw"), (4, "momentum")]
CLOSE = {"rtol": 0, "atol": 1e-12}


def whole_model():
    torch.manual_seed(0)
    return smooth_mlp(8, 13)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def train_copies(rank, copies, make):
    """Return the full model, this rank's units and its numbers of parameters and bytes."""
    trainer = SubnetTrainer(whole_model(), make, Partition(seed=3, copies=copies), INTERVAL)
    units = trainer.units
    train(trainer, trainer.optimizer, range(1, STEPS + 1), rank)
    trainer.flush()
    size = sum(parameter.numel() for parameter in trainer.subnet.parameters())
    return held(trainer), units, size, trainer.payload_bytes


def train_all(rank):
    found = {case: train_copies(rank, case[0], RULES[case[1]].make) for case in CASES}
    return found | {"local": train_copies(rank, 4, sgd)}


@pytest.fixture(scope="module")
def outcomes(ranks):
    return ranks.run(4, train_all)


def test_copies_are_trained_apart_and_averaged(outcomes):
    batches = [[batch_of(step, rank) for rank in range(4)] for step in range(1, STEPS + 1)]
    for copies, name in CASES:
        partition, model = Partition(seed=3, copies=copies), whole_model()
        draws = [partition.draw(partition.cut_dims(model), r, 4) for r in range(STEPS)]
        train_together(model, MLP_LAYOUT, draws, batches, INTERVAL, RULES[name])
        for rank in outcomes:
            for key, wanted in model.state_dict().items():
                torch.testing.assert_close(rank[copies, name][0][key], wanted, **CLOSE)


def test_as_many_copies_as_ranks_are_local_sgd(outcomes):
    models = [whole_model() for _ in range(4)]
    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            train(model, sgd(model.parameters()), [step], rank)
        x = torch.stack([nn.utils.parameters_to_vector(model.parameters()) for model in models])
        interval = 1 if step == STEPS else INTERVAL  # flush() merges the last steps
        for model, row in zip(models, local_sgd(x.detach(), step, interval), strict=True):
            nn.utils.vector_to_parameters(row.clone(), model.parameters())
    for rank in outcomes:
        for key, wanted in models[0].state_dict().items():
            torch.testing.assert_close(rank["local"][0][key], wanted, **CLOSE)


def test_neighboring_ranks_have_the_same_units_and_send_more(outcomes):
    for copies in (2, 4):
        found = [rank[copies, "momentum"] for rank in outcomes]
        for rank, (_, units, _, _) in enumerate(found):
            first = found[rank - rank % copies][1]
            assert all(torch.equal(units[name], first[name]) for name in units)
            assert len(units["0"]) == 8 * copies // 4
        assert all(size == found[0][2] for _, _, size, _ in found[:copies])
    assert outcomes[0][2, "momentum"][3] < outcomes[0][4, "momentum"][3]
    assert outcomes[0][4, "momentum"][3] == 4 * 8 * (5 * 8 + 8 + 8 * 13 + 13 + 13 * 3)


def scale_outputs(rank):
    """Return how much larger a subnet's sums are made, for two subnets of two copies."""
    inputs = torch.ones(1, 5)
    scaled = [
        SubnetTrainer(all_ones(), sgd, Partition(copies=2), 1, scale=Averaged()),
        SubnetTrainer(all_ones(), sgd, Partition(copies=2), 1, scale=Scaled()),
    ]
    outputs = [float(each(inputs).mean()) for each in scaled]
    with scaled[0].full_model() as whole:
        return [*outputs, float(whole(inputs).mean())]


def all_ones():
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def test_scales_are_of_the_number_of_subnets(ranks):
    for outputs in ranks.run(4, scale_outputs):
        assert outputs == pytest.approx([40.0, 40.0, 40.0])


def refuse(rank):
    return [
        error_of(SubnetTrainer, whole_model(), sgd, Partition(copies=3), 1),
        error_of(SubnetTrainer, whole_model(), sgd, Partition(copies=1 + rank // 2), 1),
    ]


def test_copies_that_do_not_divide_or_differ_are_one_error_on_every_rank(ranks):
    errors, *others = ranks.run(4, refuse)
    assert others == [errors] * 3
    rule = "copies of Partition must divide the number of ranks, got 3 copies and 4 ranks"
    assert rule in errors[0]
    assert "all ranks must have the same partition, got Partition(" in errors[1]
    with pytest.raises(ValueError, match="copies must be a positive number of ranks, got 0"):
        Partition(copies=0)
