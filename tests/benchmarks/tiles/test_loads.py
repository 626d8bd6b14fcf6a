"""Loads in listings of machine code that are short enough to follow by hand."""

from benchmarks.tiles.in_flight import count_blocks
from benchmarks.tiles.loads import Instruction, Loads, find_loads


def kernel(*lines: str) -> list[Instruction]:
    """Return instructions 16 bytes apart: a guard or -, the opcode, then the operands."""
    parts = [[*line.split(maxsplit=2), "", ""] for line in lines]
    return [
        Instruction(16 * i, guard.strip("-@"), opcode, operands)
        for i, (guard, opcode, operands, *_) in enumerate(parts)
    ]


def late(loads: Loads) -> list[int]:
    return [each.address // 16 for each in loads.late]


LOAD_8 = "- LDG.E.EF.128 R8, desc[UR4][R2.64]"
LOAD_12 = "- LDG.E.EF.128 R12, desc[UR4][R4.64]"
CONVERT = "- HADD2.F32 R0, -RZ, R9.H0_H0"  # of the first load's second word


def test_loads_before_the_first_use_are_in_flight_together():
    found = find_loads(kernel(LOAD_8, LOAD_12, CONVERT, "- EXIT"))
    assert found == Loads(32, [], [])


def test_a_conversion_between_two_loads_makes_the_second_late():
    found = find_loads(kernel(LOAD_8, CONVERT, LOAD_12, "- EXIT"))
    assert (found.bytes_in_flight, late(found)) == (16, [2])
    assert found.late_in_branch == found.late


def test_a_use_on_one_path_makes_the_loads_behind_the_branches_late():
    found = find_loads(
        kernel("- BSSY B0, 0x50", "@P0 BRA 0x40", LOAD_8, CONVERT, "- BSYNC B0", LOAD_12, "- EXIT")
    )
    assert (found.bytes_in_flight, late(found), found.late_in_branch) == (16, [5], [])


def test_what_a_load_or_a_branch_names_is_no_use_of_another_load():
    found = find_loads(
        kernel(
            "- BSSY B0, 0x40", LOAD_8, "@!P0 BRA 0x30", "- BSYNC B0", "- IMAD R0, R1, R2, RZ",
            "- LDG.E.U16 R20, desc[UR4][R2.64]", "- MOV R21, R20", LOAD_12, CONVERT, "- EXIT",
        )
    )  # fmt: skip
    assert found == Loads(32, [], [])


def test_an_address_that_was_loaded_or_a_register_that_is_reused_is_waited_for():
    for line in ("- LDG.E.EF.64 R14, desc[UR4][R10.64]", "- MOV R11, RZ"):
        found = find_loads(kernel(LOAD_8, line, LOAD_12, "- EXIT"))
        assert 2 in late(found), line


def test_a_loop_that_loads_and_uses_is_late_from_its_second_turn():
    found = find_loads(kernel(LOAD_8, CONVERT, "@P0 BRA 0x0", "- EXIT"))
    assert (found.bytes_in_flight, late(found), found.late_in_branch) == (16, [0], [])
    assert find_loads(kernel(LOAD_8, "@P0 BRA 0x0", CONVERT, "- EXIT")).bytes_in_flight == 16


def test_blocks_of_a_multiprocessor():
    # By registers, rounded up to eights; by threads; by shared memory, a KiB more each; at most 32.
    assert count_blocks(512, 40, 0) == 3
    assert count_blocks(512, 41, 0) == 2
    assert count_blocks(512, 32, 0) == count_blocks(512, 16, 0) == 4
    assert count_blocks(512, 32, 100 * 1024) == 2
    assert count_blocks(32, 16, 0) == 32


def test_an_instruction_under_the_opposite_predicate_does_not_wait():
    guarded = "@P0" + LOAD_8.removeprefix("-")
    for line, expected in (
        ("@!P0 MOV R9, RZ", []),
        ("@P0 MOV R9, RZ", [3]),
        ("@!P1 MOV R9, RZ", [3]),
    ):
        found = find_loads(kernel(guarded, "- NOP", line, LOAD_12, CONVERT, "- EXIT"))
        assert late(found) == expected, line
    redefined = "- ISETP.NE.AND P0, PT, R1, 0x6, PT"
    found = find_loads(kernel(guarded, redefined, "@!P0 MOV R9, RZ", LOAD_12, "- EXIT"))
    assert late(found) == [3]
    both = find_loads(kernel(guarded, "@!P0" + LOAD_8[1:], "@P0 MOV R9, RZ", LOAD_12, "- EXIT"))
    assert late(both) == [3]
