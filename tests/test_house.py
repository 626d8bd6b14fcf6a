"""The counts of ``python -m tests.house``: each finds planted examples, and the limits hold."""

import pytest

from tests.house import LIMITS, MEASURES, ROOT, TRACED

LINE, CLASS, ATTRIBUTE = "1\n", "class A:\n", "    a = 1\n"
CHECKS = """
def find_size_error(size):
    return "negative" if size < 0 else None

def checksum(x):
    if x is None:
        raise ValueError(
            "x must be a tensor, got None"
        )
    if not x:
        x = 1
        raise ValueError("x")
    return x
"""
COPIES = """
def f(a, b, state):
    a.b.counts = b.step = self.step = 1
    a.rank, self.x = 1, 2
    state.step += 1
    a.step = state.step
    for a.x in b:
        self.y.z: int = 3
"""
AVERAGER = """
class Base(Joinable):
    c = 1
    def f(self): ...
class ModelAverager(Base):
    a, _b = 1, 2
    d: int = 0
    def f(self): ...
    @property
    def p(self): ...
    @p.setter
    def p(self, x): ...
    @override
    def join_hook(self): ...
    def __init__(self): ...
"""
FORWARDS = '''
class A:
    @property
    def x(self):
        """Return x."""
        return self.inner.x
    def f(self): self.inner.f()
    def g(self): return super().g()
    def h(self): return self.inner.h() + 1
'''
ROUND = "row = self.headers.of_round(1)\nself.exchange.start([])"
# One trainer uses w, z (through w), x and t; two use y, none uses v.
COMM = {
    "comm/__init__.py": "from .x import a\nfrom .y import b\n__all__ = ['a', 'b']",
    "comm/v.py": LINE,
    "comm/w.py": "from .z import c\n" + LINE * 9,
    "comm/x.py": LINE * 100,
    "comm/y.py": LINE * 1000,
    "comm/z.py": LINE * 20,
    "training/t.py": "from ..comm.y import b\n",
    "gossip/g.py": "from ..comm import b\nfrom ..comm.w import d\nfrom ..training import t",
    "pipeline/a/p.py": "def f():\n    from ...comm import a, b",
}
KINDS = {
    "gossip/algorithms/a.py": "class SGP:\n    def error_at(self): ...\n    def f_error(self): ...",
    "compression/c.py": "class TopK:\n    def _find_error(self): ...\nisinstance(x, TopK)",
    "gossip/g.py": "isinstance(x, (SGP, int))\nisinstance(x, int)\nisinstance(x, TopK | SGP)",
}
WIDE = "def f(self, a, b, c, d, e, f, g, *, h, i, j, k, l{}): ..."
PLANTED = [
    ("lines of the package", {"gossip/x.py": "\n\n1\n", "y.py": "1"}, 4),
    ("lines of its checks and raises", {"x.py": CHECKS}, 7),
    ("lines of comm", COMM, 1134),
    ("exports of comm", COMM, 2),
    ("lines of comm and training that one trainer uses", COMM, 131),
    ("steps, counts and places copied onto another object", {"x.py": COPIES}, 3),
    ("files with such copies", {"x.py": COPIES, "y.py": COPIES, "z.py": "a.b = 1"}, 2),
    ("attributes set on another object", {"x.py": COPIES}, 7),
    ("classes above 300 lines", {"x.py": CLASS + ATTRIBUTE * 299}, 0),
    ("classes above 300 lines", {"x.py": CLASS + ATTRIBUTE * 300}, 1),
    ("files of 300 lines and more", {"x.py": LINE * 299, "y.py": LINE * 300}, 1),
    ("members of ModelAverager", {"x.py": AVERAGER}, 5),
    ("methods that only forward", {"x.py": FORWARDS}, 2),
    ("files that write a gossip round out", {"gossip/x.py": ROUND, "comm/x.py": ROUND}, 1),
    ("files that write a gossip round out", {"gossip/x.py": ROUND.replace("start", "swap")}, 0),
    ("isinstance of algorithms, schedules, compressors", KINDS, 2),
    ("methods of theirs that return an error", KINDS, 2),
    ("functions of more than 12 arguments",
     {"x.py": WIDE.format(", m"), "y.py": WIDE.format(""), "ops/x.py": WIDE.format(", m")}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sources", "expected"), PLANTED)
def test_a_measure_counts_what_is_planted(tmp_path, name, sources, expected):
    for path, source in sources.items():
        file = tmp_path / "pyparallel" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    assert MEASURES[name][0](tmp_path) == expected


def test_every_goal_has_planted_examples():
    with_goal = {name for name, (_, goal) in MEASURES.items() if goal is not None}
    assert {name for name, *_ in PLANTED} == with_goal


@pytest.mark.parametrize("name", [name for name in LIMITS if name not in TRACED])
def test_the_tree_is_within_its_limits(name):
    count, goal = MEASURES[name]
    least = 0 if goal == 0 else 1  # 0 of what must be there is a count of what has another name
    assert least <= count(ROOT) <= LIMITS[name]
