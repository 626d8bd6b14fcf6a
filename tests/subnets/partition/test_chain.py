"""Cut dimensions of an nn.Sequential, and modules that cannot be inferred."""

import pytest
from torch import nn

from pyparallel.subnets import Place, SequentialChain
from tests.subnets.helpers.models import convolutions, mlp, mlp_with_norms, transformer


def test_an_mlp_needs_no_rules():
    first, second = SequentialChain().cut_dims(mlp(), "")
    assert (first.name, first.units, second.name, second.units) == ("0", 8, "2", 12)
    assert first.places == (Place("0.weight", 0), Place("0.bias", 0), Place("2.weight", 1))
    assert second.consumers == ("4",)


def test_norms_and_inner_sequentials_are_parts_of_the_chain():
    first, second = SequentialChain().cut_dims(mlp_with_norms(), "net")
    assert Place("net.0.1.running_mean", 0) in first.places
    assert Place("net.0.2.weight", 0) in first.places
    assert [place.tensor for place in second.places] == ["net.2.weight", "net.4.weight"]


def test_a_flatten_gives_every_channel_several_columns():
    cut_dims = SequentialChain().cut_dims(convolutions(), "")
    assert [(cut_dim.name, cut_dim.units) for cut_dim in cut_dims] == [
        ("0", 6),
        ("4", 4),
        ("7", 10),
    ]
    assert Place("7.weight", 1, unit_size=9) in cut_dims[1].places


def test_modules_outside_the_chain_may_be_of_any_kind():
    chain = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), Odd())
    assert [cut_dim.name for cut_dim in SequentialChain().cut_dims(chain, "")] == ["1"]


class Odd(nn.Module):
    """A module of unknown kind."""


def between(*modules):
    return nn.Sequential(nn.Linear(4, 6), *modules, nn.Linear(6, 2))


ONE = nn.Linear(4, 4)
GLU = nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 2))
GROUPED = nn.Sequential(nn.Conv1d(4, 6, 1), nn.Conv1d(6, 6, 1, groups=2))
AFTER_CONV = [nn.Sequential(nn.Conv1d(4, 6, 1), *m, nn.Linear(6, 2)) for m in ([], [nn.Flatten(2)])]


def test_modules_that_cannot_be_inferred_are_named(subtests):
    for module, error_text in [
        (Odd(), "an nn.Sequential only, got net of Odd; declare what is cut"),
        (nn.Sequential(ONE, nn.ReLU()), r"two Linear layers .* got net.0 of Linear, net.1 of ReLU"),
        (
            between(Odd()),
            r"layers net.0 and net.2 must not mix .* got net.1 of Odd; declare other cuts",
        ),
        (between(nn.LayerNorm(6)), "net.1 of LayerNorm, which normalizes over units"),
        (between(nn.MultiheadAttention(6, 2)), "whose heads can be cut where it is written"),
        (between(nn.Softmax(-1)), "net.1 of Softmax"),
        (GLU, "net.1 of GLU"),
        (between(nn.MaxPool1d(2)), "after a Linear layer or a Flatten, where it mixes units"),
        (GROUPED, "must have groups=1, got net.1"),
        (AFTER_CONV[0], r"\(from a convolution to a Linear layer through a Flatten\)"),
        (AFTER_CONV[1], "start_dim=2 and end_dim=-1, which must be 1 and -1"),
        (nn.Sequential(nn.Linear(4, 6), nn.Flatten(), nn.Linear(18, 2)), "6 units and 18 inputs"),
        (nn.Sequential(nn.Linear(4, 6), nn.Conv1d(6, 2, 1)), "must take the units of net.0"),
        (transformer(), r"net.1 of Block; declare other cuts"),
    ]:
        with subtests.test(error_text), pytest.raises(ValueError, match=error_text):
            SequentialChain().cut_dims(module, "net")
