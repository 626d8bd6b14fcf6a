"""Where the loads of a kernel stand in its machine code: all before the first use, or not.

The kernels load their buffers by ``__ldcs``, which machine code marks as evict-first; scalars, and
the elements of a tail one by one, are loaded otherwise. An instruction that names a register of a
load in flight waits for it, and so do all later ones of the thread.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")
PREDICATE = re.compile(r"\bU?P\d\b")


@dataclass(frozen=True)
class Instruction:
    """One line of a listing; ``guard`` is the predicate under which it is executed, or empty."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def is_streaming_load(self) -> bool:
        """Whether a kernel loads a buffer by it."""
        return self.opcode.startswith("LDG.") and ".EF" in self.opcode

    @property
    def is_streaming_store(self) -> bool:
        """Whether a kernel stores a buffer by it."""
        return self.opcode.startswith("STG.") and ".EF" in self.opcode

    @property
    def num_bytes(self) -> int:
        """Return what a load or a store moves."""
        widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((widths[part] for part in self.opcode.split(".") if part in widths), 4)

    @property
    def targets(self) -> dict[int, int]:
        """Return the registers that a load writes, with the bytes in each."""
        first = re.match(r"R(\d+)", self.operands)
        assert first, f"a load without a target register: {self}"
        count = (self.num_bytes + 3) // 4
        return {int(first[1]) + i: min(4, self.num_bytes) for i in range(count)}

    @property
    def registers(self) -> set[int]:
        """Return the registers that it names, without a load's targets."""
        operands = self.operands.partition(",")[2] if self.is_streaming_load else self.operands
        named = set()
        for number, pair in REGISTER.findall(operands):
            named |= {int(number), int(number) + 1} if pair else {int(number)}
        return named


@dataclass(frozen=True)
class Loads:
    """The loads of a kernel."""

    bytes_in_flight: int  # of one thread, the most on any path to its first use of one
    late: list[Instruction]  # loads that come after a use of another on some path
    late_in_branch: list[Instruction]  # those that come after it although no branch lies between


def disassemble(path: Path, architecture: str | None = None) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel in a library, for one architecture, or in a cubin."""
    kernels: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in read_listing(path, architecture, "-sass").splitlines():
        if match := INSTRUCTION.match(line):
            address, guard, opcode, operands = match.groups()
            current.append(Instruction(int(address, 16), guard or "", opcode, operands))
        elif match := re.match(r"\s*Function : (\w+)", line):
            current = kernels[match[1]] = []
    return kernels


def read_listing(path: Path, architecture: str | None, what: str) -> str:
    """Return what the disassembler that Triton brings lists of a library or a cubin."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        raise RuntimeError("triton must be installed, which brings cuobjdump; it was not found")
    cuobjdump = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    only = ["-arch", architecture] if architecture else []
    command = [cuobjdump, *only, what, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass
class _State:
    """What may hold before an instruction."""

    # Registers of loads in flight, with the predicate under which each is loaded, or empty:
    # under its opposite no instruction waits
    pending: dict[int, str] = field(default_factory=dict)
    used: bool = False  # on some path a load was waited for
    # Registers in flight, with the bytes of each, on paths where none was; None: no path
    fresh: dict[int, int] | None = None

    def merge(self, other: "_State") -> bool:
        """Add what may hold on another path; return whether that is new."""
        before = self._size()
        for register, guard in other.pending.items():
            known = self.pending.setdefault(register, guard)
            self.pending[register] = guard if known == guard else ""
        self.used |= other.used
        if other.fresh is not None:
            self.fresh = {**(self.fresh or {}), **other.fresh}
        return before != self._size()

    def _size(self) -> tuple[int, int, bool, int]:
        guarded = sum(guard != "" for guard in self.pending.values())
        fresh = -1 if self.fresh is None else len(self.fresh)
        return len(self.pending), guarded, self.used, fresh

    def add(self, load: Instruction) -> None:
        for register in load.targets:
            known = self.pending.setdefault(register, load.guard)
            self.pending[register] = load.guard if known == load.guard else ""
        if self.fresh is not None:
            self.fresh |= load.targets

    def is_waited_for(self, instruction: Instruction) -> bool:
        """Whether an instruction uses a load in flight."""
        own = instruction.guard
        guards = (self.pending.get(register) for register in instruction.registers)
        opposite = "!" + own if not own.startswith("!") else own.strip("!")
        return any(guard is not None and guard != opposite for guard in guards)

    def forget_predicates(self, instruction: Instruction) -> None:
        """Treat predicates that an instruction names, and may set, as unknown."""
        for predicate in PREDICATE.findall(instruction.operands):
            for register, guard in self.pending.items():
                if guard.strip("!") == predicate:
                    self.pending[register] = ""


def find_loads(kernel: list[Instruction]) -> Loads:
    """Follow all paths through a kernel."""
    order = {instruction.address: i for i, instruction in enumerate(kernel)}
    ends = ends_of_branches(kernel)
    states: dict[int, _State] = {0: _State(fresh={})}
    late: set[int] = set()
    most, waiting = 0, [0]
    while waiting:
        index = waiting.pop()
        instruction, state = kernel[index], states[index]
        after = _State(used=state.used)
        after.merge(state)
        if state.is_waited_for(instruction):
            most = max(most, sum((state.fresh or {}).values()))
            after = _State(used=True)
        after.forget_predicates(instruction)
        if instruction.is_streaming_load:
            if after.used:
                late.add(index)
            after.add(instruction)
        for following in followers(kernel, index, order, ends):
            if following not in states:
                states[following] = _State()
                states[following].merge(after)
                waiting.append(following)
            elif states[following].merge(after):
                waiting.append(following)
    in_branch = [index for index in late if _used_in_branch(kernel, index)]
    return Loads(most, [kernel[i] for i in sorted(late)], [kernel[i] for i in sorted(in_branch)])


def ends_of_branches(kernel: list[Instruction]) -> dict[int, set[int]]:
    """Return where the threads of a divergent branch meet again, by the address of each BSYNC."""
    opened: list[tuple[int, str, int]] = []
    for instruction in kernel:
        if instruction.opcode.startswith("BSSY"):
            barrier, _, target = instruction.operands.partition(",")
            opened.append((instruction.address, barrier.strip(), int(target.strip(" `()"), 16)))
    ends = {}
    for instruction in kernel:
        if instruction.opcode.startswith("BSYNC"):
            own = [each for each in opened if each[1] == instruction.operands.strip()]
            around = [each for each in own if each[0] < instruction.address < each[2]]
            # Code that was moved out of its branch may belong to any.
            ends[instruction.address] = {each[2] for each in (around[-1:] or own)}
    return ends


def followers(
    kernel: list[Instruction], index: int, order: dict[int, int], ends: dict[int, set[int]]
) -> Iterator[int]:
    instruction = kernel[index]
    base = instruction.opcode.split(".")[0]
    jumps = base in {"BRA", "JMP", "BSYNC", "EXIT", "RET"}
    assert base not in {"BRX", "JMX"}, f"an indirect branch: {instruction}"
    conditional = instruction.guard not in {"", "PT"} or re.match(r"!?U?P\d", instruction.operands)
    if (not jumps or conditional) and index + 1 < len(kernel):
        yield index + 1
    if base in {"BRA", "JMP"}:
        target = re.search(r"0x([0-9a-f]+)", instruction.operands)
        assert target, f"a branch without a target: {instruction}"
        yield order[int(target[1], 16)]
    if base == "BSYNC":
        for address in ends[instruction.address]:
            yield order[address]


def _used_in_branch(kernel: list[Instruction], index: int) -> bool:
    """Whether a load follows the use of another in a sequence without branches."""
    state = _State()
    labels = {int(t, 16) for i in kernel for t in re.findall(r"\b0x([0-9a-f]+)", i.operands)}
    jumps = ("BRA", "JMP", "BSYNC", "EXIT", "RET", "CALL", "WARPSYNC")
    begin = index
    while begin > 0 and kernel[begin].address not in labels:
        if kernel[begin - 1].opcode.startswith(jumps):
            break
        begin -= 1
    for instruction in kernel[begin:index]:
        if state.is_waited_for(instruction):
            return True
        state.forget_predicates(instruction)
        if instruction.is_streaming_load:
            state.add(instruction)
    return False
