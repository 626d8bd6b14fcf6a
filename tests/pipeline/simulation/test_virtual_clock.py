"""Who waits, who is busy, and what has arrived by when."""

from pyparallel.pipeline import Action, Kind
from pyparallel.pipeline.simulation.virtual_clock import (
    SimulatedAction,
    SimulatedMessage,
    VirtualClock,
)


def forward(microbatch, stage=0):
    return Action(stage, Kind.FORWARD, microbatch)


def run(*processes):
    clock = VirtualClock(processes)
    clock.run()
    return [[each[1:] for each in ran] for ran in clock.completed], clock.finished


def test_a_rank_does_one_thing_after_the_other():
    assert run(
        iter([SimulatedAction(forward(0), 2.0), SimulatedAction(forward(1), 3.0)]), iter([])
    ) == (
        [[(0.0, 2.0), (2.0, 5.0)], []],
        [True, True],
    )


def test_a_parcel_leaves_at_the_end_of_the_work_and_travels():
    inbox = []

    def receiver():
        yield lambda: len(inbox) == 1
        yield SimulatedAction(forward(0, 1), 1.0)
        yield lambda: len(inbox) == 1  # is there already
        yield SimulatedAction(forward(1, 1), 1.0)

    sender = iter(
        [SimulatedAction(forward(0), 2.0, [SimulatedMessage(1, 0.5, lambda: inbox.append(0))])]
    )
    assert run(sender, receiver()) == (
        [[(0.0, 2.0)], [(2.5, 3.5), (3.5, 4.5)]],
        [True, True],
    )


def test_what_comes_while_a_rank_works_does_not_interrupt_it():
    inbox, seen = [], []

    def receiver():
        yield SimulatedAction(forward(0, 1), 5.0)
        seen.append(list(inbox))
        yield lambda: bool(inbox)
        yield SimulatedAction(forward(1, 1), 1.0)

    sender = iter(
        [SimulatedAction(forward(0), 2.0, [SimulatedMessage(1, 0.0, lambda: inbox.append(0))])]
    )
    assert run(sender, receiver())[0][1] == [(0.0, 5.0), (5.0, 6.0)]
    assert seen == [[0]]


def test_what_arrives_at_a_moment_is_there_for_all_who_decide_at_it():
    # Rank 0 is asked before rank 1 at time 2, but what rank 1 has sent is there.
    seen, inbox = [], []

    def looking():
        yield SimulatedAction(forward(0), 2.0)
        seen.extend(inbox)

    sender = iter(
        [SimulatedAction(forward(0, 1), 2.0, [SimulatedMessage(0, 0.0, lambda: inbox.append(7))])]
    )
    run(looking(), sender)
    assert seen == [7]


def test_who_waits_for_ever_has_not_finished():
    def waiting():
        yield SimulatedAction(forward(0), 1.0)
        yield lambda: False

    assert run(waiting(), iter([SimulatedAction(forward(0, 1), 3.0)])) == (
        [[(0.0, 1.0)], [(0.0, 3.0)]],
        [False, True],
    )
