"""The instructions that a warp issues on its way through a kernel, from its machine code."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.tiles.loads import Instruction, ends_of_branches, followers

_State = tuple[int, tuple[int, ...]]  # the next instruction, and how often each stop was made


@dataclass(frozen=True)
class Stop:
    """What a path has to meet at least ``times`` times; one that is 0 it may not meet at all."""

    matches: Callable[[Instruction], bool]
    times: int = 1


def shortest_path(kernel: Sequence[Instruction], stops: Sequence[Stop]) -> list[Instruction]:
    """Return the instructions of the shortest path to an exit that makes all stops.

    A warp issues an instruction whether or not its predicate holds, so each counts. Calls return.
    """
    code = list(kernel)
    order = {instruction.address: i for i, instruction in enumerate(code)}
    ends = ends_of_branches(code)

    def after(index: int, made: tuple[int, ...]) -> tuple[int, ...] | None:
        met = [stop.matches(code[index]) for stop in stops]
        if any(hit and stop.times == 0 for hit, stop in zip(met, stops, strict=True)):
            return None
        counts = zip(met, made, stops, strict=True)
        return tuple(min(count + hit, stop.times) for hit, count, stop in counts)

    wanted = tuple(stop.times for stop in stops)
    start: _State = (0, tuple(0 for _ in stops))
    came_from: dict[_State, _State | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        made = after(*state)
        if made is None:
            continue
        if code[state[0]].opcode == "EXIT" and made == wanted:
            path: list[Instruction] = []
            step: _State | None = state
            while step is not None:
                path.append(code[step[0]])
                step = came_from[step]
            return path[::-1]
        for following in followers(code, state[0], order, ends):
            if (following, made) not in came_from:
                came_from[following, made] = state
                waiting.append((following, made))
    raise ValueError("kernel must have a path with all stops, got none")
