"""The candidates: all compressors for gradients."""

import inspect
from dataclasses import is_dataclass

from pyparallel import compression
from pyparallel.compression import AttachPoint, Compressor
from pyparallel.planning.recommend import CANDIDATES, DENSE, HALF


def test_every_compressor_is_a_candidate():
    public = [getattr(compression, name) for name in compression.__all__]
    names = {
        each.__name__
        for each in public
        if inspect.isclass(each) and issubclass(each, Compressor) and is_dataclass(each)  # no base
    }
    described = " ".join(repr(candidate.compressor) for candidate in CANDIDATES)
    assert {"Int8", "ErrorFeedback"} <= names
    assert [name for name in names if f"{name}(" not in described] == []


def test_the_simplest_come_first_with_unique_names():
    names = [candidate.name for candidate in CANDIDATES]
    assert CANDIDATES[:2] == (DENSE, HALF)
    assert len(set(names)) == len(names)
    assert [candidate.name for candidate in CANDIDATES if candidate.compressor is None] == ["fp32"]


def test_all_compress_gradients(subtests):
    for candidate in CANDIDATES[1:]:
        with subtests.test(candidate=candidate):
            assert candidate.compressor.error_at(AttachPoint.DDP) is None
