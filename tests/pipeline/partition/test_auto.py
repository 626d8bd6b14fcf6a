"""The split that the user gives, and the one by profiling."""

import pytest
import torch
from torch import nn

from pyparallel.comm import DisagreementError
from pyparallel.pipeline.partition.auto import check_split, split_automatically
from tests.pipeline.clock import Clock, Takes

FEW = "num_stages must be from 1 to the number of layers, got 8 stages for 5 layers: "
COUNT = "split must hold the first layer of each stage after the first, 2 indices for 3 stages, got"
RANGE = "split must ascend, from 1 or more to 4 or less, so that every stage has one of the 5"


BAD_SPLITS = [
    ((1, 2, 3), 8, FEW),
    ((1,), 3, rf"{COUNT} 1: \[1\]"),
    ((1, 2, 3), 3, rf"{COUNT} 3: \[1, 2, 3\]"),
    ((0, 2), 3, rf"{RANGE} layers, got \[0, 2\]"),
    ((2, 5), 3, rf"{RANGE} layers, got \[2, 5\]"),
    ((2, 2), 3, RANGE),
    ((3, 2), 3, RANGE),
    ((-1, 2), 3, RANGE),
    ((1.0, 2), 3, r"split must hold integers, got \[1.0, 2\]"),
]


def test_bad_splits_are_refused_in_one_sentence(subtests):
    for split, num_stages, sentence in BAD_SPLITS:
        with (
            subtests.test(split=split, num_stages=num_stages, sentence=sentence),
            pytest.raises(ValueError, match=f"^{sentence}"),
        ):
            check_split(split, 5, num_stages)


def with_heavy(index):
    clock = Clock()
    return [Takes(clock, 1, 60 if place == index else 2) for place in range(5)]


@pytest.mark.parametrize(("index", "split"), [(0, (1, 3)), (2, (2, 3)), (4, (2, 4))])
def test_a_heavy_layer_gets_its_own_stage(monkeypatch, index, split):
    layers = with_heavy(index)
    layers[0].clock.install(monkeypatch)
    assert split_automatically(layers, torch.ones(3), 3) == split


def decide(rank, layers, example_rank, num_stages):
    example = torch.ones(3) if rank == example_rank else None
    with pytest.MonkeyPatch.context() as monkeypatch:
        layers[rank][0].clock.install(monkeypatch)
        return split_automatically(layers[rank], example, num_stages)


def failing():
    return [Takes(Clock(), 1), nn.Linear(95, 2)]


class Silent(nn.Module):
    """Fails before it runs, with an empty message."""

    def modules(self):
        raise NotImplementedError


def silent():
    return [*with_heavy(0), Silent()]


def shorter():
    return with_heavy(0)[:4]


LAYERS = [with_heavy(0), with_heavy(0)]


ERRORS = [
    (LAYERS, 1, 2, "rank 0: example must be a microbatch on the rank of the first stage, got"),
    (LAYERS, 0, 6, "got 6 stages for 5 layers: use fewer stages"),
    ([failing(), failing()], 0, 2, "rank 0: layers[1] failed while it was profiled: RuntimeErr"),
    ([silent(), silent()], 0, 2, "rank 0: NotImplementedError"),
    ([LAYERS[0], shorter()], 0, 2, "number of layers, got 5 on rank 0 and 4 on rank 1"),
]
SPLITS = {2: (4,), 4: (1, 2, 4)}  # by the number of stages


def work(rank):
    """Return this rank's splits, and its errors."""
    splits = {each: decide(rank, [with_heavy(4), with_heavy(0)], 0, each) for each in SPLITS}
    errors = []
    for layers, example_rank, num_stages, _ in ERRORS:
        with pytest.raises(DisagreementError) as caught:
            decide(rank, layers, example_rank, num_stages)
        errors.append(str(caught.value))
    return splits, errors


@pytest.fixture(scope="module")
def results(ranks):
    return ranks.run(2, work)


def test_all_ranks_have_the_split_of_rank_0(results):
    """The other rank's layers would be split differently."""
    assert [splits for splits, _ in results] == [SPLITS, SPLITS]


def test_an_error_on_one_rank_is_raised_on_all(results):
    (_, first), (_, second) = results
    assert first == second
    for error, (*_, sentence) in zip(first, ERRORS, strict=True):
        assert sentence in error
        assert error.count("rank 0") == 1, error


def shared():
    """Return layers of which 1 and 3 share their parameter."""
    layers = with_heavy(2)
    layers[3].w = layers[1].w
    return layers


def test_layers_that_share_parameters_stay_together(monkeypatch):
    layers = shared()
    layers[0].clock.install(monkeypatch)
    assert split_automatically(layers, torch.ones(3), 3) == (1, 4)
    assert split_automatically(layers, torch.ones(3), 2) == (1,)
    layers[0].w = layers[4].w
    assert split_automatically(layers, torch.ones(3), 1) == ()


def test_layers_that_share_parameters_are_split_if_too_few_others_are_left(monkeypatch):
    layers = shared()
    layers[0].clock.install(monkeypatch)
    assert split_automatically(layers, torch.ones(3), 4) == (1, 2, 3)


def test_an_error_without_a_process_group_is_a_value_error():
    with pytest.raises(ValueError, match=FEW) as caught:
        split_automatically([nn.ReLU()] * 5, torch.ones(2), 8)
    assert not isinstance(caught.value, DisagreementError)
    with pytest.raises(ValueError, match=r"^layers\[0\] failed") as caught:
        split_automatically([nn.Linear(3, 3)], torch.ones(2), 1)
    assert isinstance(caught.value.__cause__, RuntimeError)
