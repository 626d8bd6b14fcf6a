"""What tests of single calls do not show: streams, CUDA graphs, a host that does not wait."""

import pytest
import torch

from benchmarks.ops import calls
from pyparallel import ops
from tests.gpu.catalog import CASES, DEVICE, captured, changed, moved, no_synchronization, tensors

NUMEL = 5003
AHEAD = 20_000_000  # cycles for which a stream stands still: about 10 ms

# Of a peer in the benchmark that has the public calls.
pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")


def poison(arguments):
    for tensor in tensors(arguments):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def fill(arguments, source):
    for target, tensor in zip(tensors(arguments), tensors(source), strict=True):
        target.copy_(tensor)


def test_every_op_has_a_case():
    assert {case.op for case in CASES} == set(ops.names())


def test_a_graph_replays_with_new_inputs_and_new_scalars_on_the_device():
    for case in CASES:
        first = case.sample(NUMEL)
        arguments = moved(first, DEVICE)
        case.run(arguments)  # loads what a capture cannot load
        case.check(arguments, first, "before the capture")
        replay = captured(lambda case=case, arguments=arguments: case.run(arguments))
        for source in (changed(first), first):
            fill(arguments, source)
            replay()
            case.check(arguments, source, "replayed")


def test_ops_run_on_the_current_stream():
    # On another stream they would read the poison: the inputs come late, on this stream.
    stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
    for case in CASES:
        source = moved(case.sample(NUMEL), DEVICE)
        arguments = moved(source, DEVICE)
        poison(arguments)
        if stream is None:
            fill(arguments, source)
            case.run(arguments)
        else:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(AHEAD)
                fill(arguments, source)
                case.run(arguments)
            torch.cuda.current_stream().wait_stream(stream)
        case.check(arguments, source, "on a side stream")


def public_calls():
    """Return public functions of all ops with their arguments on the device."""
    with torch.device(DEVICE):
        made = [
            call for make in (calls.steps, calls.messages, calls.entries) for call in make(4096)
        ]
    return {call.op: call.run for call in made}


def test_no_public_call_stops_the_host():
    for run in public_calls().values():
        run()  # compiles
    for name, run in public_calls().items():
        with no_synchronization():
            try:
                with torch.device(DEVICE):
                    run()
            except RuntimeError as error:
                raise AssertionError(f"{name} waits for the device") from error


def test_public_calls_are_captured():
    for name, run in public_calls().items():
        with torch.device(DEVICE):
            run()
        try:
            captured(run)()
        except RuntimeError as error:
            raise AssertionError(f"{name} cannot be captured") from error


def test_unaligned_and_empty_tensors():
    for case in CASES:
        for numel in (0, 1, 4096):
            source = case.sample(numel)
            # One element after an aligned address.
            arguments = tuple(
                torch.cat([argument[:1], argument]).to(DEVICE)[1:]
                if isinstance(argument, torch.Tensor) and argument.dim() == 1
                else moved(argument, DEVICE)
                for argument in source
            )
            case.run(arguments)
            case.check(arguments, source, f"{numel} elements")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ops_run_on_the_device_of_their_tensors():
    for case in CASES:
        source = case.sample(NUMEL)
        arguments = moved(source, "cuda:1")
        with torch.cuda.device(0):
            case.run(arguments)
        case.check(arguments, source, "on the second GPU")
