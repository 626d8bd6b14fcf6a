"""What trainers ask of a schedule, so that they need not know its class."""

import ast
from pathlib import Path

import pytest

from pyparallel.pipeline import Interlocking, LinearHead
from pyparallel.pipeline.schedules import EVERY_SCHEDULE, GPipe, PipeOptim
from pyparallel.pipeline.schedules.schedule import Flushing, find_option_error
from pyparallel.pipeline.schedules.streaming import Streaming

PACKAGE = Path(__file__).resolve().parents[3] / "pyparallel"
OWN = PACKAGE / "pipeline" / "schedules"
LOSSES = Interlocking(2, LinearHead(3))
REFUSED = {
    GPipe(): {"correction": "whose gradients are not delayed"},
    PipeOptim(): {
        "gradient_accumulation_steps": "which does not flush",
        "grad_scaler": "whose stages update at different times",
    },
    LOSSES: {
        "correction": "whose gradients are not delayed",
        "gradient_accumulation_steps": "which does not flush",
        "grad_scaler": "whose stages update at different times",
        "max_norm": "whose stages learn from several losses",
        "skip connections": "whose stages learn from losses of their own",
        "tied weights": "whose stages learn from losses of their own",
        "sharded_state_dict": "whose heads are no part of the model",
    },
}


@pytest.mark.parametrize("schedule", REFUSED, ids=lambda each: type(each).__name__)
def test_what_each_kind_refuses(schedule):
    found = {option: find_option_error(schedule, option) for option in REFUSED[LOSSES]}
    expected = REFUSED[schedule]
    assert {option for option, why in found.items() if why} == expected.keys()
    assert all(found[option].startswith(why) for option, why in expected.items())


def test_every_schedule_flushes_or_delays():
    for schedule in EVERY_SCHEDULE:
        assert schedule.flushes is isinstance(schedule, Flushing), schedule
        assert schedule.delays is isinstance(schedule, Streaming), schedule
        assert schedule.flushes != schedule.delays, schedule
    assert (LOSSES.flushes, LOSSES.delays) == (False, False)


def test_an_option_without_a_rule_is_an_error():
    with pytest.raises(KeyError):
        find_option_error(LOSSES, "no option")


def find_asked(path):
    """Lines that ask of which class a schedule is."""
    for node in ast.walk(ast.parse(path.read_text())):
        asks = isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if asks and ast.unparse(node.args[0]).endswith("schedule"):
            yield node.lineno


def test_no_other_module_asks_for_the_class_of_a_schedule():
    paths = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(OWN)]
    assert {str(path): found for path in paths if (found := [*find_asked(path)])} == {}
