"""What a warp issues to encode its elements, or to decode them: it sets the time of small ones."""

import re

import pytest

from benchmarks.tiles.in_flight import readable_name
from benchmarks.tiles.loads import Instruction, disassemble
from benchmarks.tiles.paths import Stop, shortest_path
from tests.csrc.test_cuda_library import find_library

# Of int8: a thread's elements, loads and stores of whole accesses, then the most instructions
# without and with a seed, in blocks of up to 256 elements, whose threads are of one warp. A
# residual, whose dtype is known at run time, is of float32.
ENCODERS = {
    "quantize_kernel<Int8, float32, false>": (8, 2, 1, 170, 255),
    "quantize_kernel<Int8, bfloat16, false>": (16, 2, 1, 2 * 120, 2 * 195),
    "quantize_kernel<Int8, float32, true>": (8, 4, 3, 270, 350),
    "quantize_kernel<Int8, bfloat16, true>": (8, 3, 3, 285, 365),
    # Pairs of lanes exchange halves of two buffers of float32, so that they write whole sectors.
    "quantize_difference_kernel<Int8, float32>": (8, 4, 5, 285, 395),
    "quantize_difference_kernel<Int8, bfloat16>": (8, 2, 3, 295, 410),
}
SUM = "dequantize_sum_kernel<Int8>"


def is_draw(instruction: Instruction) -> bool:
    """Whether it is one of Philox's 14 multiplications; of two draws, which share one, 27."""
    return re.search("-0x2daee0ad|-0x326172a9", instruction.operands) is not None


def find_path(name: str, code: list[Instruction], draws: bool) -> list[Instruction]:
    """Return the path of a warp through whole blocks of finite numbers that are not all tiny."""
    elements, loads, stores, *_ = ENCODERS[name]
    stops = [
        Stop(lambda each: each.is_streaming_load, loads),
        Stop(is_draw, {8: 14, 16: 27}[elements] if draws else 0),
        Stop(lambda each: each.opcode.startswith("SHFL"), 5),
        Stop(lambda each: each.opcode == "FCHK", 2),  # the scale and its inverse
        Stop(lambda each: each.opcode == "FMUL", elements if stores == 1 else 2 * elements),
        Stop(lambda each: each.opcode == "FADD.RM", elements if draws else 0),
        Stop(lambda each: each.is_streaming_store, stores),
    ]
    if name.endswith("true>"):
        stops.append(Stop(lambda each: each.opcode.startswith("F2FP"), 0))
    return shortest_path(code, stops)


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[Instruction]]:
    found = disassemble(find_library("cuda"), "sm_90").items()
    named = {"{}<{}>".format(*readable_name(name)): code for name, code in found}
    return {name.replace(" >", ">"): code for name, code in named.items()}


@pytest.fixture(scope="module")
def encoders(kernels) -> dict[str, list[Instruction]]:
    return {name: kernels[name] for name in ENCODERS}


@pytest.mark.slow
def test_few_instructions_encode_elements(encoders):
    excess = {}
    for name, code in encoders.items():
        counts = [len(find_path(name, code, draws)) for draws in (False, True)]
        if any(count > most for count, most in zip(counts, ENCODERS[name][3:], strict=True)):
            excess[name] = counts
    assert excess == {}


@pytest.mark.slow
def test_few_instructions_add_eight_elements_of_eight_messages(kernels):
    stops = [
        Stop(lambda each: each.is_streaming_load, 8),
        Stop(lambda each: each.opcode == "FADD", 2 * 8 * 8),  # each is decoded, and added
        Stop(lambda each: each.is_streaming_store, 2),
    ]
    assert len(shortest_path(kernels[SUM], stops)) <= 500


@pytest.mark.slow
def test_random_numbers_are_drawn_while_loads_are_in_flight(encoders):
    for name, code in encoders.items():
        loaded: set[int] = set()
        uses, drawn = [], []
        for place, each in enumerate(find_path(name, code, True)):
            drawn += [place] if is_draw(each) else []
            uses += [place] if loaded & each.registers else []
            loaded |= set(each.targets) if each.is_streaming_load else set()
        assert min(uses) > max(drawn), name


@pytest.mark.slow
def test_no_integer_is_divided(encoders):
    divided = [name for name, code in encoders.items() for each in code if each.opcode[:3] == "I2F"]
    assert divided == []
