"""The ledger against a simulation that sees every message: masses, and the mean that they give."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from pyparallel.gossip.membership.ledger import Account, settle


@dataclass
class Message:
    """A message of one round, and what only the simulation knows of it."""

    mass: float
    value: torch.Tensor
    is_merged: bool = False
    is_acknowledged: bool = False


@dataclass
class Node:
    """A rank: numerator x, without what is in ``account.sent``, and where it is in a round."""

    x: torch.Tensor
    account: Account
    sent: dict[str, Message] = field(default_factory=dict)
    round: int = 0
    has_sent: bool = False
    has_stopped: bool = False


class Cluster:
    """Ranks of a one-peer exponential graph that move in any order; some die, all others leave."""

    def __init__(self, num_ranks, seed):
        self.random = random.Random(seed)
        values = torch.randn(num_ranks, 4, generator=torch.Generator().manual_seed(seed))
        account = {"settled": 1, "total": float(num_ranks)}
        self.nodes = {
            f"n{index}": Node(value.double(), Account(weight=1.0, **account))
            for index, value in enumerate(values)
        }
        self.epoch = 1

    def run_epoch(self, num_moves, num_deaths):
        """Return the ranks that die at random moments."""
        names, dead = list(self.nodes), []
        moments = set(self.random.sample(range(num_moves), num_deaths))
        for moment in range(num_moves):
            going = [name for name in names if not self.nodes[name].has_stopped]
            if going and moment in moments:
                dead.append(self.random.choice(going))
                self.nodes[dead[-1]].has_stopped = True
            elif going:
                self.move(self.random.choice(going), names)
        return dead

    def move(self, name, names):
        """Send, or merge, if that is possible; leave the epoch if it never will be."""
        node, own = self.nodes[name], names.index(name)
        offset = 1 << node.round % max(1, (len(names) - 1).bit_length())
        receiver, sender = names[(own + offset) % len(names)], names[(own - offset) % len(names)]
        if node.has_sent:
            other = self.nodes[sender]
            message = other.sent.get(name) if other.account.round == node.round else None
            if message is None or message.is_merged:
                node.has_stopped = other.has_stopped
                return
            message.is_merged, node.has_sent = True, False
            node.x = node.x + message.mass * message.value
            weight = node.account.weight + message.mass
            node.account.merge(self.epoch, node.round, [sender], weight)
            node.round += 1
            message.is_acknowledged = self.random.random() < 0.8  # or the receipt is not sent yet
        elif all(message.is_acknowledged for message in node.sent.values()):
            half = node.account.weight / 2
            message = Message(half, node.x / node.account.weight)
            node.sent, node.has_sent = {receiver: message}, True
            node.x = node.x / 2
            node.account.send(self.epoch, node.round, {receiver: half}, half)
        else:
            late = [self.nodes[peer] for peer, each in node.sent.items() if each.is_merged]
            for message in node.sent.values():
                message.is_acknowledged = message.is_merged and not late[0].has_stopped
            node.has_stopped = any(self.nodes[peer].has_stopped for peer in node.sent)

    def change(self, dead):
        """Settle without the dead; return what the survivors must have, and the settlement."""
        names = [name for name in self.nodes if name not in dead]
        weight, x = 0.0, torch.zeros(4, dtype=torch.float64)
        for name in names:
            node = self.nodes[name]
            unit = 2.0**-node.account.exponent
            weight, x = weight + unit * node.account.weight, x + unit * node.x
            node.account.sent = {
                peer: each.mass for peer, each in node.sent.items() if not each.is_acknowledged
            }
            for peer, each in node.sent.items():
                is_lost = each.is_acknowledged or (each.is_merged and peer in names)
                if not is_lost:
                    weight, x = weight + unit * each.mass, x + unit * each.mass * each.value
        found = settle({name: self.nodes[name].account for name in names}, list(self.nodes))
        self.epoch += 1
        for name in names:
            self.restart(name, found)
        self.nodes = {name: self.nodes[name] for name in names}
        return weight, x, found

    def restart(self, name, found):
        """Take back what was not merged, and begin the next epoch."""
        node, returned = self.nodes[name], found.returned[name]
        x = node.x * 2.0 ** (found.exponent - node.account.exponent)
        x = x + sum(returned * message.value for message in node.sent.values() if returned)
        account = Account(
            weight=found.weights[name],
            exponent=found.exponent,
            merged=node.account.merged,
            settled=self.epoch,
            total=found.total,
        )
        self.nodes[name] = Node(x, account)

    def total(self):
        """Return weight and numerator of all ranks."""
        units = [2.0**-node.account.exponent for node in self.nodes.values()]
        nodes = list(zip(units, self.nodes.values(), strict=True))
        return sum(u * n.account.weight for u, n in nodes), sum(u * n.x for u, n in nodes)


@pytest.mark.parametrize("seed", range(30))
def test_survivors_have_what_no_dead_rank_has_taken(seed):
    cluster = Cluster(7, seed)
    before = 7.0
    for num_deaths in (1, 2, 1):
        dead = cluster.run_epoch(100, num_deaths)
        weight, x, found = cluster.change(dead)
        total, numerator = cluster.total()
        assert total == pytest.approx(weight, abs=1e-12)
        torch.testing.assert_close(numerator, x, rtol=0, atol=1e-12)
        unit = 2.0**-found.exponent
        assert unit * found.lost == pytest.approx(before - weight, abs=1e-12)
        assert 0.5 <= found.total < 1
        before = weight


def test_plain_push_sum_loses_mass_of_living_ranks():
    """What the ledger is for: without it messages that nobody has merged are gone."""
    errors = []
    for seed in range(40):
        cluster = Cluster(7, seed)
        dead = cluster.run_epoch(100, 1)
        survivors = [node for name, node in cluster.nodes.items() if name not in dead]
        plain = sum(node.x for node in survivors) / sum(node.account.weight for node in survivors)
        weight, x, _ = cluster.change(dead)
        total, numerator = cluster.total()
        torch.testing.assert_close(numerator / total, x / weight, rtol=0, atol=1e-12)
        errors.append(float((plain - x / weight).norm()))
    assert sum(error > 0.01 for error in errors) > 30


def test_a_member_that_was_left_behind_has_nothing():
    left = Account(weight=1.0, epoch=1, round=3, sent={"b": 0.5}, settled=1, total=3.0)
    other = Account(weight=1.5, settled=2, total=2.0)
    found = settle({"a": left, "b": other}, ["b", "c"])
    assert found.weights["a"] == found.returned["a"] == 0
    assert found.lost / found.total == pytest.approx(0.5 / 1.5)


def test_what_was_sent_to_a_member_that_was_left_behind_comes_back():
    left = Account(weight=1.0, merged={"1": {"b": 3}}, settled=1, total=2.0)
    other = Account(weight=0.5, epoch=1, round=3, sent={"a": 0.5}, settled=1, total=2.0)
    found = settle({"a": left, "b": other}, ["b"])
    assert found.weights["b"] / found.total == 1
    assert found.returned["b"] / found.total == 0.5


def test_weights_get_small_for_ever():
    account = Account(weight=1.0, settled=1, total=1.0)
    for epoch in range(5000):
        found = settle({"a": account}, ["a"])
        half = found.total / 2
        account = Account(half, found.exponent, settled=epoch, total=found.total)
    assert account.exponent == 4998
    assert 0.25 <= account.weight < 1


def test_mass_that_grows_is_an_error():
    with pytest.raises(RuntimeError, match="must not grow when members change"):
        settle({"a": Account(weight=2.0, settled=1, total=1.0)}, ["a"])
