"""What SubnetTrainer.metrics() returns, against values computed in other ways."""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from pyparallel import SubnetTrainer
from pyparallel.subnets import Central, Partition

sgd = partial(torch.optim.SGD, lr=0.1)


INTERVAL = 3
CUT_BYTES = 4 * (5 * 4 + 4 + 4 * 2)  # of a rank: half of the 8 hidden units' weights and biases
SHARED_BYTES = 4 * 2  # the output's bias


def measure(rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    trainer = SubnetTrainer(
        model, sgd, Partition(), INTERVAL, placement=Central(0), nonfinite="skip"
    )
    found = [trainer.metrics()]
    for index in range(7):
        trainer.optimizer.zero_grad()
        trainer(torch.randn(4, 5)).square().mean().backward()
        if rank == 1 and index in (0, 4):
            trainer.subnet[0].weight.grad[0, 0] = float("inf")
        if index == 5:  # before a merge
            dist.barrier()
            time.sleep(0.3 if rank == 0 else 0)
        trainer.optimizer.step()
        found.append(trainer.metrics())
    trainer.flush()
    return [*found, trainer.metrics()]


def test_metrics_are_bytes_merges_and_waits(ranks):
    results = ranks.run(2, measure)
    for rank, found in enumerate(results):
        assert all(type(value) is float for metrics in found for value in metrics.values())
        columns = {name.removeprefix("rank/"): [each[name] for each in found] for name in found[0]}
        assert columns["steps"] == [0, 1, 2, 3, 4, 5, 6, 7, 7]
        assert columns["staleness"] == [0, 1, 2, 0, 1, 2, 0, 1, 0]
        assert columns["merges"] == [0, 0, 0, 1, 1, 1, 2, 2, 3]
        assert columns["skipped_steps"] == ([0, 1, 1, 1, 1, 2, 2, 2, 2] if rank else [0] * 9)
        # Rank 0 stores the model: it sends the other's units, once more at construction, and rank 1
        # sends its own. A ring's all-reduce sends 2 (n - 1) / n.
        merges = columns["merges"]
        assert columns["bytes_sent"] == [
            (number + (rank == 0)) * CUT_BYTES + number * SHARED_BYTES for number in merges
        ]
        waiting = columns["waiting_seconds"]
        assert [step for step, seconds in enumerate(waiting) if seconds] == [3, 6]
        if rank == 0:
            assert waiting[6] < 0.2
        else:
            assert 0.2 < waiting[6] < 5
