"""What a warp issues to encode eight elements a thread: it sets the time of small elements."""

import re

import pytest

from benchmarks.tiles.in_flight import readable_name
from benchmarks.tiles.loads import Instruction, disassemble
from benchmarks.tiles.paths import Stop, shortest_path
from tests.csrc.test_cuda_library import find_library

# Of int8, without and with a seed. Blocks of up to 256 elements, whose threads are of one warp.
MOST_INSTRUCTIONS = {
    "quantize_kernel<Int8, float32, void>": (180, 265),
    "quantize_kernel<Int8, bfloat16, void>": (190, 275),
    "quantize_kernel<Int8, float32, float32>": (240, 320),
    "quantize_kernel<Int8, bfloat16, float32>": (250, 330),
    "quantize_kernel<Int8, bfloat16, bfloat16>": (270, 350),
    "quantize_difference_kernel<Int8, float32>": (245, 355),
    "quantize_difference_kernel<Int8, bfloat16>": (295, 410),
}


def is_draw(instruction: Instruction) -> bool:
    """Whether it is one of Philox's 14 multiplications."""
    return re.search("-0x2daee0ad|-0x326172a9", instruction.operands) is not None


def find_path(code: list[Instruction], draws: bool, has_residual: bool) -> list[Instruction]:
    """Return the path of a warp through whole blocks of finite numbers that are not all tiny."""
    stops = [
        Stop(lambda each: each.is_streaming_load),
        Stop(is_draw, 14 if draws else 0),
        Stop(lambda each: each.opcode.startswith("SHFL"), 5),
        Stop(lambda each: each.opcode == "FCHK", 2),  # the scale and its inverse
        Stop(lambda each: each.opcode == "FMUL", 16 if has_residual else 8),
        Stop(lambda each: each.opcode == "FADD.RM", 8 if draws else 0),
        Stop(lambda each: each.is_streaming_store, 2 if has_residual else 1),
    ]
    return shortest_path(code, stops)


@pytest.fixture(scope="module")
def encoders() -> dict[str, list[Instruction]]:
    kernels = disassemble(find_library("cuda"), "sm_90")
    named = {"{}<{}>".format(*readable_name(name)): code for name, code in kernels.items()}
    return {name: named[name] for name in MOST_INSTRUCTIONS}


@pytest.mark.slow
def test_few_instructions_encode_eight_elements(encoders):
    found = {
        name: tuple(len(find_path(code, draws, "void" not in name)) for draws in (False, True))
        for name, code in encoders.items()
    }
    excess = {
        name: counts
        for name, counts in found.items()
        if any(count > most for count, most in zip(counts, MOST_INSTRUCTIONS[name], strict=True))
    }
    assert excess == {}


@pytest.mark.slow
def test_random_numbers_are_drawn_while_loads_are_in_flight(encoders):
    for name, code in encoders.items():
        loaded: set[int] = set()
        uses, drawn = [], []
        for place, each in enumerate(find_path(code, True, "void" not in name)):
            drawn += [place] if is_draw(each) else []
            uses += [place] if loaded & each.registers else []
            loaded |= set(each.targets) if each.is_streaming_load else set()
        assert min(uses) > max(drawn), name


@pytest.mark.slow
def test_no_integer_is_divided(encoders):
    divided = [name for name, code in encoders.items() for each in code if each.opcode[:3] == "I2F"]
    assert divided == []
