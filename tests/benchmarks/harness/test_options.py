"""Options of rows without their defaults."""

from benchmarks.harness.options import shorten
from pyparallel.compression import Chain, ErrorFeedback, Int8, TopK
from pyparallel.gossip import SGP
from pyparallel.gossip.topology import OnePeerExponential


def test_defaults_are_left_out():
    for options, short in [
        (SGP(OnePeerExponential(4)), "SGP(OnePeerExponential(4))"),
        (SGP(OnePeerExponential(4), overlap=1), "SGP(OnePeerExponential(4), overlap=1)"),
        (ErrorFeedback(Int8()), "ErrorFeedback(Int8())"),
        (Chain(TopK(0.01), Int8(seed=3)), "Chain(TopK(0.01), second=Int8(seed=3))"),
    ]:
        assert shorten(repr(options)) == short
        assert repr(eval(short)) == repr(options)  # the same options still


def test_other_text_stays():
    for text in ("DistributedDataParallel alone", "Unknown(width=3)", ""):
        assert shorten(text) == text
