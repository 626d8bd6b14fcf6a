"""The order of actions, waits and messages on the virtual clock."""

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


def test_a_rank_runs_one_action_at_a_time():
    assert run(
        iter([SimulatedAction(forward(0), 2.0), SimulatedAction(forward(1), 3.0)]), iter([])
    ) == (
        [[(0.0, 2.0), (2.0, 5.0)], []],
        [True, True],
    )


def test_a_message_is_sent_at_the_end_of_its_action():
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


def test_a_message_does_not_interrupt_an_action():
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


def test_messages_are_delivered_before_ranks_decide_at_the_same_time():
    # Rank 0 is advanced before rank 1 at time 2, but the message of rank 1 has arrived.
    seen, inbox = [], []

    def looking():
        yield SimulatedAction(forward(0), 2.0)
        seen.extend(inbox)

    sender = iter(
        [SimulatedAction(forward(0, 1), 2.0, [SimulatedMessage(0, 0.0, lambda: inbox.append(7))])]
    )
    run(looking(), sender)
    assert seen == [7]


def test_a_rank_that_waits_forever_has_not_finished():
    def waiting():
        yield SimulatedAction(forward(0), 1.0)
        yield lambda: False

    assert run(waiting(), iter([SimulatedAction(forward(0, 1), 3.0)])) == (
        [[(0.0, 1.0)], [(0.0, 3.0)]],
        [False, True],
    )
