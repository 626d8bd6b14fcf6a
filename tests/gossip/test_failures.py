"""Invalid arguments of a trainer: one clear error on every rank, never a hang."""

import math
import re

import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.compression import ErrorFeedback, Int8
from pyparallel.gossip import OSGP, SGP, AllReduce, DiLoCo
from pyparallel.gossip.topology import Complete, Ring
from tests.gossip.graphs import Broken, StarWithChords
from tests.gossip.loops import error_of


class Scaled(nn.Module):
    """One parameter of any kind."""

    def __init__(self, parameter, name="scale"):
        super().__init__()
        self.register_parameter(name, nn.Parameter(parameter))


def linear(rank):
    return nn.Linear(4, 2)


def on_rank_one(value):
    """Return a function that makes a module of one parameter: ``value`` on rank 1, else zeros."""
    return lambda rank: Scaled(value if rank == 1 else torch.zeros(3))


def other_name(rank):
    return Scaled(torch.zeros(3), name="scale" if rank != 1 else "gain")


def own(model, rank):
    return list(model.parameters())


def lacks_bias(model, rank):
    return [model.weight] if rank == 1 else list(model.parameters())


def owns_more(model, rank):
    return [*model.parameters(), nn.Parameter(torch.zeros(1))]


def channels_last_on_rank_one(rank):
    conv = nn.Conv2d(2, 2, 3, bias=False)
    return conv.to(memory_format=torch.channels_last) if rank == 1 else conv


def other_buffer(rank):
    model = linear(rank)
    model.register_buffer("table", torch.zeros(3 + rank))
    return model


def frozen_on_rank_one(rank):
    model = linear(rank)
    model.bias.requires_grad_(rank != 1)
    return model


def own_trainable(model, rank):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def overlapping(rank):
    values = torch.ones(8)
    parts = {"first": nn.Parameter(values[:6]), "second": nn.Parameter(values[2:])}
    return nn.ParameterDict(parts)


class Failing(Broken):
    """Raises an IndexError on every rank."""

    def out_peers(self, rank, round_index):
        raise IndexError("no such rank")


class ModuleInAList(list):
    """A list with a module, which has parameters but is none."""

    def __init__(self):
        super().__init__([nn.Linear(4, 2)])

    def parameters(self):
        return self[0].parameters()


SPARSE = torch.zeros(3).to_sparse()
RING = SGP(Ring(2))
OPPOSITE = SGP(Broken((2,), (0,), (1,))), SGP(Broken((1,), (2,), (0,)))
# A function that makes a rank's module, one that chooses parameters, the algorithm (or those of the
# other ranks and of rank 1), and the error.
MISTAKES = {
    "topology for others": (
        linear, own, SGP(Ring(4)),
        r"topology must be for the process group's 2 ranks, got Ring\(4\); leave it out for ",
    ),
    "topology for others on one rank": (
        linear, own, (RING, SGP(Ring(4))),
        r"rank 1: topology must be for the process group's 2 ranks, got Ring\(4\)",
    ),
    "invalid topology": (
        linear, own, SGP(Broken((1,), ())),
        "must connect every rank to every other over its period",
    ),
    "other algorithm": (
        linear, own, (RING, SGP(Complete(2))),
        r"same algorithm, got SGP\(topology=Ring\(2\), .* on rank 0 and .*Complete\(2\).* rank 1",
    ),
    "other transport": (
        linear, own, (RING, SGP(Ring(2), transport="symmetric_memory")),
        "same transport, got process_group on rank 0 and symmetric_memory on rank 1",
    ),
    "symmetric memory on the CPU": (
        linear, own, SGP(Ring(2), transport="symmetric_memory"),
        "parameters must be on a GPU with transport='symmetric_memory', got cpu; leave tra",
    ),
    "other shape": (
        on_rank_one(torch.zeros(4)), own, RING,
        r"same parameter 0, got scale float32 \[3\] on rank 0 and scale float32 \[4\] on rank 1",
    ),
    "other dtype": (
        on_rank_one(torch.zeros(3).half()), own, RING,
        r"same parameter 0, got scale float32 \[3\] on rank 0 and scale float16 \[3\] on rank 1",
    ),
    "other name": (
        other_name, own, RING,
        r"same parameter 0, got scale float32 \[3\] on rank 0 and gain float32 \[3\] on rank 1",
    ),
    "sparse": (
        on_rank_one(SPARSE), own, RING,
        "rank 1: parameters must be dense, got scale with layout torch.sparse_coo",
    ),
    "float64 that is compressed": (
        on_rank_one(torch.zeros(3).double()), own, DiLoCo(5, compressor=ErrorFeedback(Int8())),
        "rank 1: parameters must not be float64 with a compressor, got DiLoCo",
    ),
    "complex": (
        on_rank_one(torch.zeros(3, dtype=torch.complex64)), own, RING,
        "rank 1: parameters must be float32, float64, bfloat16 or float16, got scale of "
        "torch.complex64",
    ),
    "parameter not in the optimizer": (
        linear, lacks_bias, RING,
        "rank 1: optimizer must own all trainable parameters of the module, got one without bias",
    ),
    "parameter not in the module": (
        linear, owns_more, RING,
        r"ranks 0-1: optimizer must own only parameters of the module, as others would never be "
        r"averaged, got 1 more, the first a tensor of shape \[1\] and torch.float32; wrap a module "
        r"that holds all",
    ),
    "other strides": (
        channels_last_on_rank_one, own, RING,
        r"same parameter 0, got weight .* on rank 0 and weight .* with strides .* on rank 1",
    ),
    "other buffer": (
        other_buffer, own, RING,
        r"same buffer 0, got table float32 \[3\] on rank 0 and table float32 \[4\] on rank 1",
    ),
    "frozen elsewhere": (
        frozen_on_rank_one, own_trainable, RING,
        r"same parameter 1, got bias float32 \[2\] on rank 0 and .* \[2\] frozen on rank 1",
    ),
    "another graph of the same name": (
        linear, own, OPPOSITE, "all ranks must have the same topology, got",
    ),
    "a topology that fails": (
        linear, own, (SGP(Broken((1,), (0,))), SGP(Failing((1,), (0,)))),
        "rank 1: IndexError: no such rank",
    ),
    "a lazy module": (
        lambda rank: nn.LazyLinear(2) if rank == 1 else linear(rank), own, RING,
        "rank 1: module must have shapes, got weight, which is lazy; run it once",
    ),
    "overlapping views": (
        overlapping, own, RING,
        "ranks 0-1: parameters must not share memory, got first and second, which overlap: use on",
    ),
    "another device": (
        lambda rank: nn.Linear(4, 2, device="meta"), own, RING,
        "process_group must exchange meta tensors, got one for .*cpu:gloo",
    ),
    "two devices": (
        lambda rank: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2, device="meta")), own, RING,
        "parameters must be on one device, got 1.weight on meta",
    ),
    "an algorithm's class": (
        linear, own, SGP,
        r"ranks 0-1: algorithm must be an object such as SGP\(\)"
        r", got the class SGP; create an object, SGP\(...\)$",
    ),
    "an algorithm's class on rank 1": (
        linear, own, (AllReduce(), AllReduce),
        "rank 1: algorithm must be .* got the class AllReduce; create an object",
    ),
    "a topology": (
        linear, own, Ring(2), r"got Ring\(2\); wrap it, SGP\(Ring\(2\)\)$",
    ),
    "a topology's class": (
        linear, own, Ring,
        r"got the class Ring; give it to an algorithm, SGP\(Ring\)$",
    ),
    "a string": (linear, own, "sgp", "algorithm must be .*, got 'sgp'$"),
    "a list of modules": (
        lambda rank: ModuleInAList(), own, RING,
        "ranks 0-1: module must be a torch.nn.Module, got a ModuleInAList of 1: Linear",
    ),
    "parameters for an optimizer": (
        linear, own, RING, "ranks 0-1: optimizer must be a torch optimizer .*, got the generator",
    ),
    "text for a bucket": (linear, own, RING, "bucket_cap_mb must be a number of MiB .*, got '25'"),
    "no bucket": (linear, own, RING, "bucket_cap_mb must be positive and finite, got nan"),
    "a DistributedDataParallel": (
        lambda rank: nn.parallel.DistributedDataParallel(linear(rank)), own, RING,
        "ranks 0-1: module must be the plain module, got DistributedDataParallel; pass ddp.module",
    ),
    "nothing to train": (
        lambda rank: nn.Linear(4, 2).requires_grad_(False), own, RING,
        "module must have parameters that require gradients, got none",
    ),
}  # fmt: skip


OF_TYPES = {
    "an algorithm's class", "an algorithm's class on rank 1", "a topology", "a topology's class",
    "a string", "a list of modules", "parameters for an optimizer", "text for a bucket",
    "a DistributedDataParallel",
}  # fmt: skip


def make_mistakes(rank, names):
    return {name: error_of(make_mistake, rank, name) for name in names}


def make_mistake(rank, name):
    make_model, choose, algorithm, _ = MISTAKES[name]
    model = make_model(rank)
    optimizer = torch.optim.SGD(choose(model, rank), lr=0.1)
    if name == "parameters for an optimizer":
        optimizer = model.parameters()
    cap = {"no bucket": math.nan, "text for a bucket": "25"}.get(name, 25)
    algorithm = algorithm[rank == 1] if isinstance(algorithm, tuple) else algorithm
    GossipDataParallel(model, optimizer, algorithm, bucket_cap_mb=cap)


def test_a_mistake_is_one_error_on_every_rank(ranks, subtests):
    of_three = ["another graph of the same name"]
    of_two = [name for name in MISTAKES if name not in of_three]
    for num_ranks, names in ((2, of_two), (3, of_three)):
        results = ranks.run(num_ranks, make_mistakes, names)
        for name in names:
            with subtests.test(name):
                (error,) = {found[name] for found in results}
                kind = "ArgumentTypeError: " if name in OF_TYPES else "DisagreementError: "
                assert error.startswith(kind)
                assert re.search(MISTAKES[name][-1], error), error


def wrap_16_bit_parameters(rank):
    model = nn.Linear(4, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithms = SGP(StarWithChords(3)), OSGP(Ring(3))
    return [error_of(GossipDataParallel, model, optimizer, each) for each in algorithms]


def test_16_bit_parameters_are_an_error_on_irregular_graphs_and_for_osgp(ranks):
    for of_sgp, of_osgp in ranks.run(3, wrap_16_bit_parameters):
        assert "parameters must be float32 or float64 if push-sum weights differ" in of_sgp
        assert "parameters must be float32 or float64 for OSGP" in of_osgp
