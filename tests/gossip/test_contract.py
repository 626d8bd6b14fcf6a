"""The contract of all algorithms with a user's loop; ``every_algorithm.py`` lists them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel
from tests.cases import slow_unless
from tests.gossip.every_algorithm import (
    COVERING,
    EVERY_ALGORITHM,
    NEEDS_EQUAL_BATCHES,
    NONDETERMINISTIC,
)

RANKS, STEPS = 4, 7


class Loop:
    """A user's training loop with a schedule and gradient clipping."""

    def __init__(self, name):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        algorithm = EVERY_ALGORITHM[name](dist.get_world_size())
        self.model = GossipDataParallel(model, self.optimizer, algorithm)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def batch(self):
        inputs = torch.randn(8, 4, generator=self.generator)
        return inputs, inputs[:, :2].sin()

    def loss(self, inputs, targets):
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.model.record_loss(loss)
        return loss

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()

    def end(self):
        """Flush; return the parameters of this rank and its push-sum weight."""
        self.model.flush()
        values = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        weight = float(self.model.push_sum_weight)
        self.model.close()
        return values.clone(), weight


def train_plainly(name):
    loop = Loop(name)
    for _ in range(STEPS):
        loop.optimizer.zero_grad()
        loop.loss(*loop.batch()).backward()
        loop.update()
    return loop.end()


def train_accumulating(name):
    loop = Loop(name)
    for _ in range(STEPS):
        loop.optimizer.zero_grad()
        inputs, targets = loop.batch()
        with loop.model.no_sync():
            (loop.loss(inputs[:4], targets[:4]) / 2).backward()
        (loop.loss(inputs[4:], targets[4:]) / 2).backward()
        loop.update()
    return loop.end()


def train_scaled(name, bad_step=None):
    """Train with a GradScaler; in ``bad_step`` rank 1 has a gradient that is not finite."""
    loop = Loop(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        loss = loop.loss(*loop.batch())
        if step == bad_step and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.schedule.step()
    return loop.end()


def train_unequally(name):
    loop = Loop(name)
    with loop.model.join():
        for _ in range(3 + 2 * dist.get_rank()):
            loop.optimizer.zero_grad()
            loop.loss(*loop.batch()).backward()
            loop.update()
    return loop.end()


def load_and_freeze(name):
    """Load parameters in the middle of training, then take steps with lr 0."""
    loop = Loop(name)
    loaded = {key: torch.full_like(value, 2.5) for key, value in loop.model.state_dict().items()}
    for step in range(12):
        loop.optimizer.zero_grad()
        loop.loss(*loop.batch()).backward()
        if step == 5:
            loop.model.load_state_dict(loaded)
            loop.schedule.base_lrs = [0.0]
            loop.optimizer.param_groups[0]["lr"] = 0.0
        loop.update()
    return loop.end()


def train_all_ways(rank, name):
    return {
        "plain": train_plainly(name),
        "accumulated": train_accumulating(name),
        "scaled": train_scaled(name),
        "skipped": train_scaled(name, bad_step=3),
        "loaded": load_and_freeze(name),
        **({} if name in NEEDS_EQUAL_BATCHES else {"joined": train_unequally(name)}),
    }


def check_mass_is_conserved(runs):
    for way in runs[0]:
        assert sum(run[way][1] for run in runs) == pytest.approx(RANKS, abs=1e-9), way
        assert all(run[way][0].isfinite().all() for run in runs), way


def check_loaded_parameters_stay_with_lr_0(runs):
    for run in runs:
        values, weight = run["loaded"]
        torch.testing.assert_close(values, torch.full_like(values, 2.5), rtol=1e-6, atol=0)
        assert weight == pytest.approx(1, abs=1)


def check_accumulated_half_batches_equal_the_batch(runs):
    for run in runs:
        torch.testing.assert_close(run["accumulated"][0], run["plain"][0], rtol=1e-4, atol=1e-6)


def check_scaled_gradients_train_bit_for_bit_like_plain_ones(runs):
    for run in runs:
        assert torch.equal(run["scaled"][0], run["plain"][0])


def check_a_skipped_step_is_skipped(runs):
    assert any(not torch.equal(run["skipped"][0], run["plain"][0]) for run in runs)


CHECKS = [check_mass_is_conserved, check_loaded_parameters_stay_with_lr_0]
CHECKS_OF_EQUAL_RUNS = [
    check_accumulated_half_batches_equal_the_batch,
    check_scaled_gradients_train_bit_for_bit_like_plain_ones,
    check_a_skipped_step_is_skipped,
]


@pytest.mark.parametrize("name", slow_unless([*COVERING, "adpsgd"], EVERY_ALGORITHM))
def test_contract(ranks, name):
    runs = ranks.run(RANKS, train_all_ways, name)
    for check in CHECKS + ([] if name in NONDETERMINISTIC else CHECKS_OF_EQUAL_RUNS):
        check(runs)
