"""Subnetworks against compressed gradients: the rules, and the rows, tables and pictures."""

import itertools

import pytest
import torch
from torch import nn

from benchmarks.harness.pictures import drawn
from benchmarks.harness.rows import read_rows
from benchmarks.subnets import compare_gradients, table
from benchmarks.subnets.compare_gradients import (
    COMPRESSED,
    EF21,
    FIELDS,
    SUBNETS,
    WHOLE,
    Network,
    descend_quadratic,
    gradients_of,
    train,
)
from benchmarks.subnets.compare_sketches import make_problem
from benchmarks.subnets.picture import PICTURES
from benchmarks.theory.quadratic import ef21


def every_diagonal(n):
    """Return those of all permutations, (n!, n, n) float64: rank i has one entry, times n."""
    orders = itertools.permutations(range(n))
    return torch.stack([n * torch.eye(n, dtype=torch.float64)[list(order)] for order in orders])


def test_compressed_gradients_are_unbiased_and_those_of_subnetworks_are_not():
    problem = make_problem(3, 3)
    x = torch.tensor([0.4, -0.7, 0.2], dtype=torch.float64)
    sketches = torch.diag_embed(every_diagonal(3))
    points = x.expand(len(sketches), 3)
    exact = problem.gradients(x.expand(3, 3)).mean(0)
    compressed = problem.compressed_gradient(points, sketches).mean(0)
    torch.testing.assert_close(compressed, exact, rtol=0, atol=1e-12)
    sketched = problem.sketched_gradient(points, sketches).mean(0)
    assert (sketched - exact).norm() > 0.1 * exact.norm()


def test_quadratics_descend_by_the_rules_of_the_papers():
    problem, size = make_problem(2, 3), 0.01
    kept = every_diagonal(2)[torch.tensor([0, 1, 1])] / 2  # of three updates
    x = dict.fromkeys((SUBNETS, COMPRESSED, EF21), torch.zeros(2, dtype=torch.float64))
    known = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]

    def gradient(rank, point):
        return problem.curvatures[rank] @ point - problem.slopes[rank]

    for masks in kept:
        c = [torch.diag(2 * mask) for mask in masks]
        of = {
            SUBNETS: sum(c[i] @ gradient(i, c[i] @ x[SUBNETS]) for i in range(2)) / 2,
            COMPRESSED: sum(c[i] @ gradient(i, x[COMPRESSED]) for i in range(2)) / 2,
        }
        for i in range(2):  # the message is the part of the difference that is kept
            known[i] = known[i] + torch.diag(masks[i]) @ (gradient(i, x[EF21]) - known[i])
        of[EF21] = sum(known) / 2
        x = {method: x[method] - size * of[method] for method in x}
    for method, expected in x.items():
        points = descend_quadratic(problem, method, [size], 2 * kept[None])
        torch.testing.assert_close(points[0, 0, -1], expected, rtol=0, atol=1e-12)


def test_ef21_knows_the_gradients_once_all_is_sent():
    gradients, zeros = torch.randn(4, 6), torch.zeros(4, 6)
    torch.testing.assert_close(ef21(zeros, gradients, torch.ones(4, 6)), gradients)
    assert torch.equal(ef21(gradients, zeros, torch.zeros(4, 6)), gradients)


def test_a_rank_of_the_network_has_the_gradient_of_its_subnetwork():
    network = Network(2, units=6, batch_size=5)
    weights = [each.double() for each in network.initial(0)]
    kept = network.draw(0, 1).double()
    copies = [each.expand(2, *each.shape) for each in weights]
    images, labels = next(network.batches(0))
    images = images.double()
    found = gradients_of(copies, images, labels, 2 * kept)
    for rank in range(2):
        (units,) = kept[rank].nonzero(as_tuple=True)
        small = nn.Sequential(nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10)).double()
        with torch.no_grad():
            small[0].weight.copy_(weights[0][units])
            small[0].bias.copy_(weights[1][units])
            small[2].weight.copy_(weights[2][:, units])
            small[2].bias.copy_(weights[3])
        hidden = 2 * small[1](small[0](images[rank]))  # scaled, as only half of the units add up
        nn.functional.cross_entropy(small[2](hidden), labels[rank]).backward()
        for grad, own in zip(
            (found[0][rank][units], found[2][rank][:, units], found[3][rank]),
            (small[0].weight.grad, small[2].weight.grad, small[2].bias.grad),
            strict=True,
        ):
            torch.testing.assert_close(grad, own)
        (others,) = (kept[rank] == 0).nonzero(as_tuple=True)
        assert not found[0][rank][others].any()


def test_one_rank_trains_the_whole_network_by_every_method():
    expected = train(Network(1), WHOLE, 0.3, 0, 20)
    assert expected[-2] < 0.9 * expected[0]
    for method in (SUBNETS, COMPRESSED, EF21):
        assert train(Network(1), method, 0.3, 0, 20) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_program_writes_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    arguments = ["--ranks", "2", "--seeds", "3", "--rounds", "20", "--updates", "20"]
    monkeypatch.setattr("sys.argv", ["compare_gradients", *arguments, "--out", str(path)])
    compare_gradients.main()
    rows = read_rows(path)
    assert len(rows) == 3 * 3 + 5 * 4
    assert set(rows[0]) == set(FIELDS)
    assert drawn(PICTURES, rows, tmp_path) == ["gradients", "received"]
    assert len(table.gradients(rows).splitlines()) == 2 + 5
    assert len(table.quadratics(rows).splitlines()) == 2 + 1
    assert "average_to_limit " in capsys.readouterr().out
