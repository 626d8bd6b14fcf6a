"""The tracer of ``python -m tests.hops``: what it finds, its limits, and the page it holds true."""

import importlib.util
import re
import threading

import pytest

from tests import hops
from tests.house import LIMITS, ROOT, TRACED

PAGE = ROOT / "docs/explanation/how_a_step_runs.md"
STATION = re.compile(r"^ {4}( *)(\w[\w.]*) +([\w/]+\.py)  +\S.*$", re.MULTILINE)
PLANTED = """
import contextlib, dataclasses, threading

class Bucket:
    def send(self, values):
        with opened():
            return [double(each) for each in values]

@dataclasses.dataclass(frozen=True)
class Policy:
    def neighbors(self):
        return (lambda: 1)()

@contextlib.contextmanager
def opened():
    yield

def double(value):
    return op(value)

def once(): ...

def receive(): ...

def step(bucket, policy, num_values):
    once()
    for _ in range(num_values):
        bucket.send([1])
        policy.neighbors()
        Bucket()
        thread = threading.Thread(target=receive)
        thread.start()
        thread.join()
"""
OP = "def op(value):\n    return kernel(value)\n\ndef kernel(value):\n    return 2 * value\n"


@pytest.fixture
def planted(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/op.py").write_text(OP)
    (tmp_path / "x.py").write_text(PLANTED)
    modules = []
    for name in ("ops/op.py", "x.py"):
        spec = importlib.util.spec_from_file_location(f"planted_{len(modules)}", tmp_path / name)
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    modules[1].op = modules[0].op
    yield tmp_path, modules[1]
    threading.setprofile(None)  # of threads that start later


def test_a_way_is_what_one_value_more_calls_more_often(planted):
    folder, module = planted
    tracer, calls = hops.Tracer(folder), []
    bucket, policy = module.Bucket(), module.Policy()
    for num_values in (1, 3):
        tracer.record(lambda n=num_values: module.step(bucket, policy, n))
        calls.append(tracer.calls)
    way = hops.find_way(*calls, 2)
    assert [(each.name, each.file, each.depth) for each in way] == [
        ("Bucket.send", "x.py", 1),
        ("opened", "x.py", 2),
        ("double", "x.py", 2),
        ("op", "ops/op.py", 3),
        ("Policy.neighbors", "x.py", 1),
        ("Policy.neighbors.<locals>.<lambda>", "x.py", 2),
        ("receive", "x.py", 0),
    ]
    assert tracer.objects() == ["Bucket"]  # the policy is frozen, the others live for a step


def test_every_traced_count_has_a_limit_between_its_goal_and_today():
    assert set(hops.count(dict.fromkeys(hops.WAYS, hops.Traced([], [], [])))) == set(TRACED)
    assert all(LIMITS[name] >= goal for name, goal in TRACED.items())


def find_stations(page):
    """Return a list for each picture of a page: indentation, name and file of each line."""
    pictures = re.findall(r"(?:^ {4}.*\n)+", page, re.MULTILINE)
    found = [[(len(a), b, c) for a, b, c in STATION.findall(picture)] for picture in pictures]
    assert [len(each) for each in found] == [picture.count("\n") for picture in pictures]
    return found


def assert_called(stations, calls):
    """Each station must be called after the one above it, by what it is indented under."""
    remaining, above = iter(calls), []
    for indent, name, file in stations:
        while above and above[-1][0] >= indent:
            above.pop()
        inside = above[-1][1] if above else -1
        call = next((each for each in remaining if (each.name, each.file) == (name, file)), None)
        assert call is not None, f"{name} of {file} is not called there"
        assert call.depth > inside, f"{name} is not called by what it stands under"
        above.append((indent, call.depth))


def test_a_page_that_lies_is_found():
    page = "x\n\n    A.run   a.py   begins\n      b     b.py   ends\n\ny\n"
    [stations] = find_stations(page)
    a, b = hops.Call("a.py", "A.run", 1), hops.Call("b.py", "b", 2)
    assert_called(stations, [a, b])
    for calls in ([b, a], [a], [a, hops.Call("c.py", "b", 2)], [a, hops.Call("b.py", "b", 1)]):
        with pytest.raises(AssertionError):
            assert_called(stations, calls)


@pytest.fixture(scope="module")
def traced():
    return {value: hops.trace(value) for value in hops.WAYS}


@pytest.mark.slow
def test_ways_are_within_their_limits(traced):
    counts = hops.count(traced)
    assert {name: number for name, number in counts.items() if not 9 < number <= LIMITS[name]} == {}


@pytest.mark.slow
def test_the_page_shows_what_is_called(traced):
    pictures = find_stations(PAGE.read_text())
    for value, stations in zip(hops.WAYS, pictures, strict=True):
        assert_called(stations, traced[value].calls)
