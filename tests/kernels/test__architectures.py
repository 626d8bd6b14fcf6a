"""Every Triton kernel on every architecture; the tests beside compile each for one of them."""

from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

from tests.kernels.inspect_triton import ARCHITECTURES, find_problems_of

KERNELS = sorted(path.stem for path in Path(__file__).parent.glob("test_[!_]*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_lean_and_move_16_bytes_at_a_time(name):
    compilations = import_module(f"tests.kernels.{name}").COMPILATIONS
    assert find_problems_of(product(compilations, ARCHITECTURES)) == []
