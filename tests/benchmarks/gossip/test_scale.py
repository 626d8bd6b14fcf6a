"""SGP on many ranks in one process: its replicas are those of a loop over models."""

import copy

import torch
from torch.nn.functional import cross_entropy

from benchmarks.gossip.scale import CONTEXT, MOMENTUM, Replicas, Run, perform
from benchmarks.gossip.table import scale
from pyparallel.gossip.topology import OnePeerExponential

RANKS, RATE = 4, 0.1


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_the_replicas_are_those_of_a_loop():
    torch.manual_seed(1)
    replicas, topology = Replicas(RANKS), OnePeerExponential(RANKS)
    models = [copy.deepcopy(replicas.model) for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(each.parameters(), RATE, momentum=MOMENTUM) for each in models]
    for index in range(5):
        windows = torch.randint(256, (RANKS, 6, CONTEXT + 1))
        mixing = torch.from_numpy(topology.mixing_matrix(index)).float()
        replicas.step(windows, RATE, mixing)
        for model, optimizer, own in zip(models, optimizers, windows, strict=True):
            optimizer.zero_grad()
            cross_entropy(model(own[:, :-1]), own[:, -1]).backward()
            optimizer.step()
        mixed = mixing @ torch.stack(list(map(flat, models)))
        for model, row in zip(models, mixed, strict=True):
            torch.nn.utils.vector_to_parameters(row, model.parameters())
    assert replicas.distance() > 0
    for model, row in zip(models, replicas.x, strict=True):
        torch.testing.assert_close(row, flat(model), rtol=1e-5, atol=1e-6)


def test_a_run_is_a_row_of_its_table():
    run = Run("Gossip-PGA, every eighth", "root", "8", 0, windows=1 << 12)
    row = {name: str(each) for name, each in (run._asdict() | perform(run)).items()}
    assert float(row["held_out_bits"]) <= float(row["worst_bits"]) < 8
    assert row["held_out_bits"][:4] in scale([row])
