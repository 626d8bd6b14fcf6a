"""Triton's interpreter, the number of torch's threads, processes that outlive a test, durations."""

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Threads that wait must not keep busy the cores of other processes: read when torch is loaded.
os.environ["OMP_WAIT_POLICY"] = "passive"

import hypothesis
import torch

if not torch.cuda.is_available():  # the kernels run under the interpreter, which is chosen first
    os.environ["TRITON_INTERPRET"] = "1"

from tests.workers import RankPool

# On busy cores an example takes any time.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

TESTS_OF_THREADS = {"ops", "csrc", "kernels"}
DURATIONS = Path(__file__).with_name("durations.json")  # seconds of each file, by the -m of the run


class Durations:
    """Adds up the seconds of each file, and writes them at the end of a run."""

    def __init__(self, selection: str) -> None:
        self.selection, self.seconds = selection, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        files = {file: round(seconds, 1) for file, seconds in sorted(self.seconds.items())}
        text = json.dumps(read_durations() | {self.selection: files}, indent=1, sort_keys=True)
        DURATIONS.write_text(f"{text}\n")


def read_durations() -> dict[str, dict[str, float]]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = f"write the seconds of each file to {DURATIONS.name}, for later runs"
    parser.addoption("--record-durations", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("markexpr")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files by their durations, longest first: a long one begun last would run alone."""
    seconds = read_durations().get(config.getoption("markexpr"), {})
    if config.getoption("dist", "no") != "no" or hasattr(config, "workerinput"):
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


def pytest_collection_finish() -> None:
    """Keep what is loaded out of each later garbage collection."""
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Trainers' tensors are small here: threads of all processes would only wait for each other."""
    before = torch.get_num_threads()
    if not TESTS_OF_THREADS.intersection(request.path.parts):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def lost_gpu(pytestconfig: pytest.Config) -> Iterator[None]:
    """End a process whose GPU a kernel's error has made unusable; xdist starts another worker."""
    yield
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        try:
            torch.cuda.synchronize()  # raises again what a kernel has raised before
        except RuntimeError as error:
            if capture := pytestconfig.pluginmanager.getplugin("capturemanager"):
                capture.suspend_global_capture()
            print(f"this process can no longer use the GPU: {error}", file=sys.__stderr__)
            os._exit(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Return processes that run functions on gloo groups; see `RankPool`."""
    pool = RankPool()
    yield pool
    pool.close()
