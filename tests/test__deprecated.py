"""Old public names work, and each gives one warning that names the new one."""

import importlib
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import _deprecated, compression, pipeline, subnets, topology, training
from pyparallel.compression import BufferLayout, CompressorState, StateStore, TopK
from pyparallel.gossip import SGP, GossipDataParallel
from pyparallel.pipeline import GPipe, PipelineShape, VersionCounters
from tests.workers import run_ranks


def test_an_old_name_is_the_new_one():
    for module, names in _deprecated._MODULES.items():
        namespace = vars(importlib.import_module(module))
        for old, new in names.items():
            namespace.pop(old, None)  # kept there once it was asked for
            sentence = rf"{old} is deprecated .* use {module}\.{new}$"
            with pytest.warns(DeprecationWarning, match=sentence):
                found = getattr(sys.modules[module], old)
            assert found is namespace[new], (module, old)


def test_importing_an_old_name_warns_once_at_the_users_line():
    vars(pipeline).pop("Layout", None)
    program = "pass\nfrom pyparallel.pipeline import Layout\nfrom pyparallel.pipeline import Layout"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(program, "theirs.py", "exec"), {})
    assert [(each.filename, each.lineno) for each in caught] == [("theirs.py", 2)]
    assert caught[0].category is DeprecationWarning
    assert str(caught[0].message).endswith("use pyparallel.pipeline.PipelineShape")


def test_what_never_was_a_name_is_an_attribute_error():
    for module in (pyparallel, compression, pipeline, subnets, topology):
        with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
            module.Nonsense  # noqa: B018


def test_what_takes_long_to_import_is_imported_when_used():
    program = """
import sys, pyparallel
late = ("torch.distributed.fsdp", "networkx", "matplotlib", "sympy")
late += tuple(f"pyparallel.{name}" for name in ("cli", "compression", "gossip", "pipeline"))
assert not [name for name in late if name in sys.modules], sys.modules.keys() & set(late)
from pyparallel.compression import fsdp_all_gather
assert "torch.distributed.fsdp" in sys.modules
pyparallel.topology.Ring(3).validate()
assert "networkx" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_old_members_of_classes():
    state = CompressorState(BufferLayout.flat(4))
    with pytest.warns(DeprecationWarning, match="use CompressorState.common_state"):
        assert state.of_all() == state.common_state()
    with pytest.warns(DeprecationWarning, match="use VersionCounters.first_forward"):
        assert VersionCounters(1, 2, 3, 4).leader == 4
    with pytest.warns(DeprecationWarning, match="use Ring.validation_error"):
        assert topology.Ring(4).problem(4) is None
    with pytest.warns(DeprecationWarning, match="use TopK.validation_error"):
        assert TopK(0.1).problem(compression.AttachPoint.DDP) is None
    with pytest.warns(DeprecationWarning, match="use GPipe.weight_predictor"):
        GPipe().foresight  # noqa: B018


def test_every_old_member_has_its_new_one():
    for module, classes in _deprecated._MEMBERS.items():
        for name, names in classes.items():
            cls = getattr(sys.modules[module], name)
            fields = {*dir(cls), *getattr(cls, "__dataclass_fields__", ())}
            assert set(names.values()) <= fields | SET_IN_INIT.get(name, set()), name


SET_IN_INIT = {
    "GossipDataParallel": {"config_fields"},
    "Collectives": {"stats"},
}


def test_names_that_left_the_package_say_where_they_are():
    with pytest.raises(ImportError, match=r"use benchmarks\.theory\.quadratic\.Quadratic from"):
        from pyparallel.subnets import Quadratic  # noqa: F401
    with pytest.raises(AttributeError, match=r"contraction\.contraction\(compressor, layout\)"):
        TopK(0.1).contraction(None)
    for moved in _deprecated._MOVED.values():
        for place in moved.values():
            module, _, name = place.partition("(")[0].rpartition(".")
            assert hasattr(importlib.import_module(module), name)


def test_old_keyword_arguments():
    with pytest.warns(DeprecationWarning, match=r"actions\(calls=...\) is deprecated .* steps="):
        old = GPipe().actions(2, 4, calls=2)
    assert old == GPipe().actions(2, 4, steps=2)


def test_subclasses_may_define_old_methods():
    with pytest.warns(DeprecationWarning, match="use Mine.validation_error") as caught:

        class Mine(topology.Ring):
            def problem(self, num_ranks):
                return "mine"

    assert Mine(4).validation_error(3) == "mine"
    assert caught[0].filename == __file__

    with pytest.warns(DeprecationWarning, match="use Order.step"):

        class Order(GPipe):
            def call(self, shape, rank, index):
                return ()

    assert Order().step(PipelineShape(2, 2, 2), 0, 0) == ()


class OldRule:
    def widths(self, module, path):
        return subnets.Hidden("0", "2").cut_dims(module, path)


def test_objects_of_the_users_own_classes_may_have_old_methods():
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(
        DeprecationWarning, match=r"OldRule.widths is deprecated .* OldRule.cut_dims"
    ):
        partition = subnets.Partition({"": OldRule()})
    assert [each.units for each in partition.cut_dims(model)] == [4]


class OldAlgorithm:
    """As a user wrote it: a protocol by its methods alone."""

    def facts(self):
        return SGP(topology.Ring(2)).config_fields()

    def problem(self, num_ranks):
        return None

    def start(self, *arguments):
        return SGP(topology.Ring(2)).start(*arguments)


def train_with_old_names(rank):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gossip = GossipDataParallel(model, optimizer, OldAlgorithm())
        weight = gossip.weight
    assert torch.equal(weight, gossip.push_sum_weight)
    return [str(each.message).partition(": use ")[2] for each in caught]


def train_with_old_names_and_load_newer_states(rank):
    return train_with_old_names(rank), load_newer(rank)


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(2, train_with_old_names_and_load_newer_states)


def test_an_algorithm_with_old_methods_trains(of_ranks):
    for warned, _ in of_ranks:
        assert warned == [
            "OldAlgorithm.config_fields",
            "OldAlgorithm.validation_error",
            "GossipDataParallel.push_sum_weight",
        ]


def test_a_state_without_a_format_is_of_the_first():
    training.check_format({})
    training.check_format({"format": 1})
    with pytest.raises(ValueError, match="the state must have checksums, got none"):
        training.check_format({"format": 2})


NEWER = "the state's format must be at most 2, got 3: a newer pyparallel has saved it; upgrade"


def test_a_compressor_refuses_a_newer_state():
    store = StateStore(TopK(0.1), 0, 1)
    with pytest.raises(ValueError, match=NEWER):
        store.load_state_dict({**store.state_dict(), "format": 3})
    store.load_state_dict(store.state_dict())


def newer(state):
    return {**state, "format": 3}


def load_newer(rank):
    """The errors with which each trainer refuses a newer state, and what it trains on with."""
    errors = []

    def expect_refusal(load, *arguments):
        with pytest.raises(ValueError, match=r"the state.s format must be") as caught:
            load(*arguments)
        errors.append(str(caught.value))

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = GossipDataParallel(model, optimizer, SGP(topology.Ring(2)))
    # One rank alone has the newer state; both must refuse.
    saved = gossip.algorithm_state_dict()
    expect_refusal(gossip.load_algorithm_state_dict, newer(saved) if rank else saved)
    gossip.load_algorithm_state_dict(saved)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    trainer = pyparallel.PipelineTrainer(
        layers, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), GPipe(),
        num_microbatches=1, split=[1],
    )  # fmt: skip
    trainer.step(torch.ones(1, 2), torch.ones(1, 2))
    saved = trainer.state_dict()
    expect_refusal(trainer.load_state_dict, {number: newer(each) for number, each in saved.items()})
    trainer.load_state_dict(saved)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    whole = subnets.SubnetTrainer(
        model, lambda p: torch.optim.SGD(p, lr=0.1), subnets.Partition(), interval=1
    )
    saved = whole.state_dict()
    expect_refusal(whole.load_state_dict, newer(saved) if rank else saved)
    whole.load_state_dict(saved)
    return errors


def test_every_trainer_refuses_a_newer_state_on_all_ranks(of_ranks):
    for rank, (_, errors) in enumerate(of_ranks):
        assert len(errors) == 3
        assert all(NEWER in error for error in errors), (rank, errors)
