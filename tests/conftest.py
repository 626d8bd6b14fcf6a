"""Triton's interpreter, the number of torch's threads, and processes that outlive a test."""

import os
from collections.abc import Iterator

import pytest

# Threads that wait must not keep busy the cores of other processes: read when torch is loaded.
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch

if not torch.cuda.is_available():  # the kernels run under the interpreter, which is chosen first
    os.environ["TRITON_INTERPRET"] = "1"

from tests.workers import RankPool

TESTS_OF_THREADS = {"ops", "csrc", "kernels"}


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Trainers' tensors are small here: threads of all processes would only wait for each other."""
    before = torch.get_num_threads()
    if not TESTS_OF_THREADS.intersection(request.path.parts):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Return processes that run functions on gloo groups; see `RankPool`."""
    pool = RankPool()
    yield pool
    pool.close()
