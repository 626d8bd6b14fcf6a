"""Each algorithm with each pair of features trains as plain loops with the paper's rule."""

import copy
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pyparallel import GossipDataParallel
from pyparallel.compression import TopK
from pyparallel.gossip import AllReduce, GossipState, Hierarchical, NoLoCo
from tests.cases import pairwise
from tests.gossip.every_algorithm import DETERMINISTIC, EVERY_ALGORITHM
from tests.pairs.loops import (
    FEATURES,
    Feature,
    Loop,
    every_pair,
    flat,
    forget_compiled,
    train_plainly,
)
from tests.pairs.papers_rules import start_rule


def with_options(**options):
    """Return what sets an algorithm's options; None if it has none of these names."""

    def change(algorithm):
        names = {each.name for each in fields(algorithm)}
        return replace(algorithm, **options) if {*options} <= names else None

    return change


def lossless(algorithm):
    turns = {"pull_turns": 1} if isinstance(algorithm, NoLoCo) else {}
    return with_options(compressor=TopK(1.0), **turns)(algorithm)


FEATURES = FEATURES | {
    "codec": Feature(algorithm=lossless),
    "fragments": Feature(algorithm=with_options(fragments=2, delay=1)),
    "sharded": Feature(options={"sharded": True}),
}
REFUSED = {  # an algorithm or feature, and another feature
    ("slowmo", "fragments"): "fragments must be 1 and delay 0 with an inner algorithm, got 2 and 1",
    ("hierarchical", "sharded"): "algorithm must be the one between replicas for a module that",
    ("allreduce", "sharded"): "algorithm must be a gossip algorithm for a module that fully_shard",
    ("easgd", "sharded"): "algorithm must read no momentum for a module that fully_shard",
}

OF_FOUR = ("hierarchical", "leadersgd", "noloco", "sgp-star", "sgp-phases")  # more than pairs


class TrainedLoop(Loop):
    """A loop with the trainer."""

    def optimizer_kind(self):
        return self.kind

    def shard(self):
        self.mesh = None
        if self.sharded:
            shape = dist.get_world_size() // 2, 2
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            fully_shard(self.module, mesh=self.mesh["shard"])

    def scale(self, optimizer):
        """Leave it to the trainer."""

    def wrap(self):
        given = self.optimizers if self.several else self.optimizers[0]
        replicas = {"mesh": self.mesh["replicate"]} if self.mesh else {}
        return GossipDataParallel(self.called, given, self.algorithm, **replicas)

    def no_sync(self):
        return self.forward.no_sync()

    def record(self, loss):
        self.forward.record_loss(loss)

    def state_dict(self):
        return self.forward.state_dict()

    def load_state_dict(self, state):
        self.forward.load_state_dict(state)

    def resume(self):
        """Go on in a new trainer from what was saved."""
        states = copy.deepcopy([each.state_dict() for each in self.saved()])
        self.forward.close()
        self.set_up()
        for each, state in zip(self.saved(), states, strict=True):
            each.load_state_dict(state)

    def saved(self):
        return [GossipState(self.forward, self.optimizers), *self.schedulers, self.grad_scaler]


def set_up(name, chosen, num_ranks):
    """Return the features, the algorithm with their options, and the trainer's dtype.

    The algorithm is None if a feature is no option of it.
    """
    features = [FEATURES[each] for each in chosen]
    algorithm = EVERY_ALGORITHM[name](num_ranks // 2 if "sharded" in chosen else num_ranks)
    if any("finds_unused" in each.options for each in features):
        within = AllReduce(find_unused_parameters=True)
        if isinstance(algorithm, Hierarchical):
            algorithm = replace(algorithm, within=within)
        algorithm = within if isinstance(algorithm, AllReduce) else algorithm
    if "sharded" in chosen and getattr(algorithm, "compressor", None):
        algorithm = lossless(algorithm)  # each shard has largest entries of its own
    for each in features:
        algorithm = algorithm and each.algorithm(algorithm)
    is_wide = getattr(algorithm, "compressor", None) is None and "our optimizer" not in chosen
    return features, algorithm, torch.float64 if is_wide else torch.float32


def train(rank, name, chosen):
    """Return the parameters after each step, and of the consensus with the buffers; or an error."""
    try:
        features, algorithm, dtype = set_up(name, chosen, dist.get_world_size())
        forget_compiled(chosen)
        loop = TrainedLoop(rank, features, dtype, algorithm=algorithm)
        history = loop.train()
        with loop.forward.consensus() as module:
            history.append(flat([*module.parameters(), *module.buffers()]))
        loop.forward.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return history


def expect(name, chosen, num_ranks):
    """Return what `train` should on each rank."""
    features, algorithm, _ = set_up(name, chosen, num_ranks)
    forget_compiled(chosen)
    loops = [Loop(rank, features) for rank in range(num_ranks)]
    first, messages = loops[0], {}
    for place, parameter in enumerate(first.parameters):
        bucket = first.rate_of(parameter) if "our optimizer" in chosen else 0
        layer = first.names[place].split(".")[0] if hasattr(algorithm, "fragments") else 0
        messages.setdefault((bucket, layer), []).append(place)
    size = 2 if "sharded" in chosen else 1
    rules = [start_rule(algorithm, loops, each, size) for each in messages.values()]
    histories = train_plainly(loops, rules)
    for each in rules:
        each.x = each.consensus().expand(num_ranks, -1)
    buffers = torch.stack([flat(loop.module.buffers()) for loop in loops]).unflatten(0, (-1, size))
    for rank, (loop, history) in enumerate(zip(loops, histories, strict=True)):
        mean = buffers.mean(0)[rank % size]  # of the ranks that hold the same shards
        history.append(torch.cat([flat(loop.module.parameters()), mean]))
    return histories


def compare(name, chosen, found):
    if text := refusal_of(name, chosen):
        assert all(text in each for each in found), found[0]
        return
    *_, dtype = set_up(name, chosen, len(found))
    most = {"sgp-int8": 0.02}.get(name, 1e-10 if dtype == torch.float64 else 2e-5)
    for rank, (ours, theirs) in enumerate(
        zip(found, expect(name, chosen, len(found)), strict=True)
    ):
        assert isinstance(ours, list), ours
        far = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
        assert all(each < most for each in far), (rank, far)  # no nan is


def check(ranks, subtests, num_ranks, rows):
    for row, found in zip(
        rows, ranks.run_each(num_ranks, train, rows, time_limit=300), strict=True
    ):
        with subtests.test(str(row)):
            compare(*row, found)


def rows_of(names):
    """Return every pair of features, each with the next algorithm that has such options."""
    rows = []
    for name, chosen in every_pair(names, FEATURES):
        first = names.index(name)
        in_turn = (each for each in names[first:] + names[:first] if has_options(each, chosen))
        rows.append((next(in_turn), chosen))
    return rows


def has_options(name, chosen):
    try:
        return set_up(name, chosen, 4)[1] is not None
    except ValueError:
        return True  # of options that do not go together: the trainer's loop raises it again


def refusal_of(name, chosen):
    texts = (text for (whom, feature), text in REFUSED.items()
             if feature in chosen and (name.startswith(whom) or whom in chosen))  # fmt: skip
    return next(texts, None)


SAMPLE = pairwise(
    ["osgp", "slowmo", "diloco"], ["frozen later", "dropout"], ["resumed", "swapped", "post-hook"]
)  # fmt: skip


def test_a_sample_of_pairs_trains_as_plain_loops(ranks, subtests):
    check(ranks, subtests, 2, [(name, tuple(chosen)) for name, *chosen in SAMPLE])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_pair_of_features_trains_as_plain_loops(ranks, subtests, num_ranks):
    rows = rows_of(DETERMINISTIC)
    check(ranks, subtests, num_ranks, [row for row in rows if needs_four(*row) == (num_ranks == 4)])


def needs_four(name, chosen):
    return "sharded" in chosen or name.startswith(OF_FOUR)
