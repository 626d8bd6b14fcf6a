"""What tests of single calls do not show: streams, CUDA graphs, a host that does not wait."""

import re
import subprocess
import sys

import pytest
import torch

from benchmarks.ops import calls
from pyparallel import ops
from tests.gpu.catalog import (
    CASES,
    DEVICE,
    captured,
    no_synchronization,
    side_stream,
    synchronize,
    tensors,
)

NUMEL = 5003
OF_MESSAGES = [case.op for case in CASES if re.search("quantize|signs", case.op)]
# Of a peer in the benchmark that has the public calls.
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")


RAISES = """
import torch
from pyparallel import ops

used, device = {used!r}, {device!r}
torch.ones(2, device=used).sum().item()  # loads the driver, or not
x, y = torch.zeros(4, device=device), torch.zeros(3, device=device)
try:
    torch.ops.pyparallel.add_or_clear_(x, y, 1.0, None)
except RuntimeError as error:
    print(error)
"""


def poison(arguments):
    for tensor in tensors(arguments):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def fill(arguments, source):
    for target, tensor in zip(tensors(arguments), tensors(source), strict=True):
        target.copy_(tensor)


def test_every_op_has_a_case():
    assert {case.op for case in CASES} == set(ops.names())


@each_case
def test_a_graph_replays_with_new_inputs_and_new_scalars_on_the_device(case):
    first = case.sample(NUMEL)
    arguments = case.on_device(first)
    case.run(arguments)  # loads what a capture cannot load
    case.check(arguments, first, "before the capture")
    replay = captured(lambda: case.run(arguments))
    for source in (case.changed(first), first):
        fill(arguments, source)
        replay()
        case.check(arguments, source, "replayed")


@each_case
def test_ops_run_on_the_current_stream(case):
    # On another stream they would read the poison: the inputs come late, on this stream.
    source = case.on_device(case.sample(NUMEL))
    arguments = case.on_device(source)
    poison(arguments)
    synchronize()
    with side_stream():
        fill(arguments, source)
        case.run(arguments)
    case.check(arguments, source, "on a side stream")


@each_case
def test_unaligned_and_empty_tensors(case):
    for numel in (0, 1, 4096):
        source = case.sample(numel)
        # One element after an aligned address.
        arguments = tuple(
            torch.cat([argument[:1], argument])[1:]
            if isinstance(argument, torch.Tensor) and argument.dim() == 1
            else argument
            for argument in case.on_device(source)
        )
        case.run(arguments)
        case.check(arguments, source, f"{numel} elements")


@pytest.mark.parametrize("op", OF_MESSAGES)
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_torchs_ops_give_the_same_where_nvcc_is_missing(op):
    (case,) = (case for case in CASES if case.op == op)
    source = case.sample(NUMEL)
    arguments = case.on_device(source)
    case.reference(*arguments)
    case.check(arguments, source, "by torch's ops on the device")


def public_calls():
    """Return public functions of all ops with their arguments on the device."""
    with torch.device(DEVICE):
        made = [
            call for make in (calls.steps, calls.messages, calls.entries) for call in make(4096)
        ]
    return {call.op: call.run for call in made}


def test_no_public_call_stops_the_host():
    problems = []
    for name, run in public_calls().items():
        run()  # compiles
        try:
            with no_synchronization():
                run()
        except RuntimeError as error:
            problems.append(f"{name}: {error}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", sorted(ops.names()))
def test_public_calls_are_captured(name):
    run = public_calls()[name]
    run()
    captured(run)()
    synchronize()


@pytest.mark.slow
@pytest.mark.parametrize(("used", "device"), [("cpu", "cpu"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_an_error_of_a_compiled_op_reaches_python(used, device):
    if DEVICE.type == "cpu" and "cuda" in (used, device):
        pytest.skip("needs a GPU")
    command = [sys.executable, "-c", RAISES.format(used=used, device=device)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "call the op of pyparallel.ops for details" in done.stdout, done.stderr


@each_case
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ops_run_on_the_device_of_their_tensors(case):
    source = case.sample(NUMEL)
    arguments = case.on_device(source, "cuda:1")
    with torch.cuda.device(0):
        case.run(arguments)
    case.check(arguments, source, "on the second GPU")
