"""Which optimizer steps count."""

import pytest
import torch
from torch import nn

from pyparallel import optim
from pyparallel.training.step_hook import StepHook, StepHooks


class Forwarding(torch.optim.SGD):
    """An optimizer whose step calls its parent's."""

    def step(self, closure=None):
        return super().step(closure)


class LossFirst(torch.optim.SGD):
    """An optimizer that runs the closure itself."""

    def step(self, closure=None):
        loss = closure() if closure else None
        super().step()
        return loss


def make(kind):
    counted = []
    optimizer = kind([nn.Parameter(torch.zeros(2))], lr=0.1)
    return optimizer, StepHook(optimizer, lambda: counted.append(1)), counted


KINDS = [torch.optim.SGD, Forwarding, LossFirst]


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_counts_once_with_a_closure_or_without(kind):
    optimizer, hook, counted = make(kind)

    def closure():
        hook.see_forward()
        return 3.0

    for number in range(1, 4):
        assert optimizer.step(closure) == 3.0
        optimizer.step(closure=closure)
        optimizer.step()
        assert len(counted) == 3 * number
    hook.close()
    optimizer.step(closure)
    assert len(counted) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_whose_closure_raises_does_not_count_and_the_next_does(kind):
    optimizer, hook, counted = make(kind)

    def fails():
        hook.see_forward()
        raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError, match="inside"):
            optimizer.step(fails)
    assert counted == []
    optimizer.step()
    optimizer.step(lambda: 1.0)
    assert len(counted) == 2


class Failing(torch.optim.SGD):
    """An optimizer that raises once, after its closure."""

    fails = True

    def step(self, closure=None):
        closure()
        if self.fails:
            self.fails = False
            raise MemoryError
        return super().step()


def test_an_optimizer_that_raises_in_its_step_gets_one_error():
    optimizer, hook, counted = make(Failing)
    with pytest.raises(MemoryError):
        optimizer.step(lambda: 1.0)
    with pytest.raises(RuntimeError, match="got an interrupted or a nested one"):
        optimizer.step(lambda: 1.0)
    optimizer.step(lambda: 1.0)
    assert len(counted) == 1
    optimizer.fails = True
    with pytest.raises(MemoryError):
        optimizer.step(lambda: 1.0)
    hook.see_forward()  # outside of a closure
    optimizer.step(lambda: 1.0)
    assert len(counted) == 2


class Twice(torch.optim.SGD):
    """An optimizer that evaluates its closure a second time."""

    def step(self, closure=None):
        loss = super().step(closure)
        if closure:
            closure()
        return loss


def record(kind):
    """Return an optimizer, a closure and the list that gets what happens, in order."""
    optimizer, events = kind([nn.Parameter(torch.zeros(2))], lr=0.1), []
    hook = StepHook(
        optimizer,
        lambda: events.append("after"),
        lambda _, has_gradients: events.append(f"before, {has_gradients}"),
        lambda: events.append("before_update"),
        lambda: events.append("before_evaluation"),
    )

    def closure():
        hook.see_forward()
        events.append("closure")
        return 1.0

    return optimizer, closure, events


EVALUATES = ["before_evaluation", "closure"]
EVALUATES_ONCE = [*EVALUATES, "before, True", "before_update", "after"]
MAY_EVALUATE_AGAIN = ["before, False", *EVALUATES, "before_update", "after"]
EVALUATES_TWICE = [*MAY_EVALUATE_AGAIN[:-1], *EVALUATES, "before_update", "after"]


@pytest.mark.parametrize("kind", [*KINDS, optim.SGD, Twice])
def test_a_step_with_a_closure_begins_after_it_if_that_is_known_to_be_evaluated_once(kind):
    optimizer, closure, events = record(kind)
    optimizer.step()
    assert events == ["before, True", "before_update", "after"]
    expected = {
        torch.optim.SGD: EVALUATES_ONCE,
        optim.SGD: EVALUATES_ONCE,
        Twice: EVALUATES_TWICE,
    }
    for _ in range(2):
        events.clear()
        optimizer.step(closure)
        assert events == expected.get(kind, MAY_EVALUATE_AGAIN)


class Ignores(torch.optim.SGD):
    """An optimizer that does not evaluate its closure."""

    def step(self, closure=None):
        return super().step()


def test_a_step_that_ignores_its_closure_counts():
    optimizer, closure, events = record(Ignores)
    for _ in range(2):
        events.clear()
        optimizer.step(closure)
        assert events == ["before, False", "after"]


def test_a_training_step_is_one_step_of_each_also_after_one_that_raises():
    events = []
    kinds = (Forwarding, Failing, torch.optim.SGD)
    optimizers = [kind([nn.Parameter(torch.zeros(2))], lr=0.1) for kind in kinds]
    hooks = StepHooks(
        optimizers,
        lambda: events.append("after"),
        lambda optimizer, _: events.append(f"before {type(optimizer).__name__}"),
        lambda index, is_first: events.append((index, is_first)),
        lambda: events.append("each"),
    )
    forwarding, failing, sgd = optimizers
    failing.fails = False
    for first, second, third in [(0, 1, 2), (2, 0, 1)]:
        events.clear()
        names = [kinds[index].__name__ for index in (first, second, third)]
        for index in (first, second, third):
            # Failing evaluates a closure itself.
            torch.optim.SGD.step(optimizers[index])
        expected = [(first, True), "each", (second, False), "each", (third, False), "each"]
        assert events == [f"before {names[0]}", *expected, "after"]
    failing.register_step_pre_hook(fail_once := FailOnce())
    events.clear()
    with pytest.raises(MemoryError):
        torch.optim.SGD.step(failing)
    assert fail_once.has_failed
    hooks.see_forward()
    for each in (failing, sgd):
        torch.optim.SGD.step(each)
    assert events[:4] == ["before Failing", (1, True), "before Failing", (1, True)]
    for each in (failing, sgd):
        with pytest.raises(RuntimeError, match=r"before one of Forwarding \(optimizer\[0\]\)"):
            torch.optim.SGD.step(each)
    assert "after" not in events
    forwarding.step()
    assert events[-2:] == ["each", "after"]


class FailOnce:
    """A hook of a user that raises in its first call."""

    has_failed = False

    def __call__(self, *_):
        if not self.has_failed:
            self.has_failed = True
            raise MemoryError
