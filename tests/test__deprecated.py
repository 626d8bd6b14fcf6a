"""Old public names work, and each gives one warning that names the new one."""

import importlib
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import _deprecated, comm, compression, pipeline, subnets, topology
from pyparallel.compression import BufferLayout, CompressorState, StateStore, TopK
from pyparallel.gossip import SGP, GossipDataParallel
from pyparallel.pipeline import GPipe, PipelineShape, VersionCounters
from tests.workers import run_ranks

MODULE_NAMES = [
    (m, old, new) for m, names in _deprecated._MODULES.items() for old, new in names.items()
]


def import_twice(module, old):
    """Warnings of a fresh process that imports an old name, and then uses it again."""
    program = f"import warnings\nwarnings.simplefilter('always')\nfrom {module} import {old}\n"
    command = [sys.executable, "-c", f"{program}from {module} import {old}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [line for line in result.stderr.splitlines() if "DeprecationWarning" in line]


@pytest.mark.parametrize(("module", "old", "new"), MODULE_NAMES)
def test_an_old_name_is_the_new_one(module, old, new):
    namespace = vars(sys.modules[module])
    namespace.pop(old, None)  # kept there once it was asked for
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated .* use {module}\.{new}$"):
        found = getattr(sys.modules[module], old)
    assert found is namespace[new]


def test_importing_an_old_name_warns_once_at_the_users_line():
    (line,) = import_twice("pyparallel.pipeline", "Layout")
    assert line.startswith("<string>:3: ")
    assert line.endswith("use pyparallel.pipeline.PipelineShape")


@pytest.mark.parametrize("module", [pyparallel, compression, pipeline, subnets, topology])
def test_what_never_was_a_name_is_an_attribute_error(module):
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
        return SGP(topology.Ring(1)).config_fields()

    def problem(self, num_ranks):
        return None

    def start(self, *arguments):
        return SGP(topology.Ring(1)).start(*arguments)


def train_with_old_names(rank):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gossip = GossipDataParallel(model, optimizer, OldAlgorithm())
        weight = gossip.weight
    assert torch.equal(weight, gossip.push_sum_weight)
    return [str(each.message).partition(": use ")[2] for each in caught]


def test_an_algorithm_with_old_methods_trains():
    assert run_ranks(1, train_with_old_names) == [
        [
            "OldAlgorithm.config_fields",
            "OldAlgorithm.validation_error",
            "GossipDataParallel.push_sum_weight",
        ]
    ]


def test_a_state_without_a_format_is_of_the_first():
    comm.check_format({})
    comm.check_format({"format": comm.FORMAT})


NEWER = "the state's format must be at most 1, got 2: a newer pyparallel has saved it; upgrade"


def test_a_compressor_refuses_a_newer_state():
    store = StateStore(TopK(0.1), 0, 1)
    with pytest.raises(ValueError, match=NEWER):
        store.load_state_dict({**store.state_dict(), "format": 2})
    store.load_state_dict(store.state_dict())


def newer(state):
    return {**state, "format": 2}


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


def test_every_trainer_refuses_a_newer_state_on_all_ranks():
    for rank, errors in enumerate(run_ranks(2, load_newer)):
        assert len(errors) == 3
        assert all(NEWER in error for error in errors), (rank, errors)
