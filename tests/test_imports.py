"""Modules import what takes long when it is used, and have no other names."""

import subprocess
import sys

import pytest

import pyparallel
from pyparallel import compression, pipeline, subnets, topology


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
