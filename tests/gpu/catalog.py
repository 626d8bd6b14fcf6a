"""Arguments of every op, and where the tests of this folder run: on a GPU, else on the CPU.

On the CPU the same code runs without streams and graphs, so that it works when a GPU is there.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pyparallel.ops.adamw_step import adamw_step_reference
from pyparallel.ops.mix import add_or_clear_reference, mix_reference, screen_headers_reference
from pyparallel.ops.mix_quantized import mix_quantized_reference
from pyparallel.ops.orthogonalize import orthogonalize_reference
from pyparallel.ops.pack_signs import (
    dequantize_statistical_reference,
    pack_signs_reference,
    quantize_statistical_reference,
    unpack_signs_reference,
)
from pyparallel.ops.predict_adam import predict_adam_reference
from pyparallel.ops.predict_sgd import predict_sgd_reference
from pyparallel.ops.quantize import (
    dequantize_reference,
    dequantize_sum_reference,
    quantize_reference,
)
from pyparallel.ops.quantize_difference import quantize_difference_reference
from pyparallel.ops.random_k import random_k_indices_reference, random_k_reference
from pyparallel.ops.sgd_step import clear_nonfinite_reference, sgd_step_reference
from pyparallel.ops.top_k import (
    scatter_add_reference,
    scatter_chunks_reference,
    top_k_chunks_reference,
    top_k_reference,
)
from tests.ops import (
    test_adamw_step,
    test_mix,
    test_mix_quantized,
    test_orthogonalize,
    test_pack_signs,
    test_predict_adam,
    test_predict_sgd,
    test_quantize,
    test_quantize_difference,
    test_random_k,
    test_sgd_step,
    test_top_k,
)
from tests.ops.parity import READ_ON_THE_HOST, arguments_on

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INT8 = (8, "int", 256)


@dataclass(frozen=True)
class OpCase:
    """An op with its reference, and arguments on the CPU for a number of elements.

    Args:
        by_elements: parts of whole blocks of elements can be computed apart.
        tolerance: absolute; 0: to the last bit.
    """

    op: str
    reference: Callable[..., object]
    sample: Callable[[int], tuple[Any, ...]]
    by_elements: bool = True
    tolerance: float = 0.0

    def on_device(self, arguments: tuple[Any, ...], device: str | torch.device = DEVICE) -> Any:
        """Return the arguments with copies of their tensors where the op wants them."""
        return arguments_on(device, self.op, arguments)

    def changed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments with other real numbers, scalars on the device included."""
        host = READ_ON_THE_HOST.get(self.op)  # when the op is called: a graph keeps that
        return tuple(each if i == host else changed(each) for i, each in enumerate(arguments))

    def run(self, arguments: tuple[Any, ...]) -> object:
        """Run the op on the device of its arguments."""
        return getattr(torch.ops.pyparallel, self.op)(*arguments)

    def check(self, actual: tuple[Any, ...], before: tuple[Any, ...], context: str) -> None:
        """Compare arguments after the op with those of the reference, run on ``before``."""
        expected = moved(before, "cpu")
        self.reference(*expected)
        torch.testing.assert_close(
            tensors(moved(actual, "cpu")),
            tensors(expected),
            rtol=0.0,
            atol=self.tolerance,
            equal_nan=True,
            msg=lambda text: f"{self.op}, {context}: {text}",
        )


def moved(tree: Any, device: torch.device | str) -> Any:
    """Return the arguments with copies of their tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(device, copy=True), tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def changed(tree: Any) -> Any:
    """Return a tree with other real numbers."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t * 0.5 if t.is_floating_point() else t.clone(), tree
    )


def _dequantize(numel: int) -> tuple[Any, ...]:
    codes, scales = test_quantize.message(numel, *INT8)
    return codes, scales, *INT8, True, torch.ones(numel), torch.zeros((), dtype=torch.int64)


def _dequantize_sum(numel: int) -> tuple[Any, ...]:
    messages = [test_quantize.message(numel + each, *INT8) for each in range(3)]
    codes, scales = zip(*messages, strict=True)
    codes = torch.stack([each[:numel] for each in codes])
    scales = torch.stack([each[: -(-numel // 256)] for each in scales])
    return codes, scales, *INT8, 3.0, torch.ones(numel), torch.zeros((), dtype=torch.int64)


CASES = [
    OpCase("mix_", mix_reference, lambda numel: test_mix.sample(numel, 2)),
    OpCase(
        "adamw_step_",
        adamw_step_reference,
        lambda numel: tuple(test_adamw_step.sample(numel).values()),
    ),
    OpCase(
        "sgd_step_", sgd_step_reference, lambda numel: tuple(test_sgd_step.sample(numel).values())
    ),
    OpCase(
        "clear_nonfinite_",
        clear_nonfinite_reference,
        test_sgd_step.sample_nonfinite,
        by_elements=False,
    ),
    OpCase("predict_adam", predict_adam_reference, test_predict_adam.sample),
    OpCase("predict_sgd", predict_sgd_reference, test_predict_sgd.sample),
    OpCase(
        "quantize",
        quantize_reference,
        lambda n: test_quantize.prepare(
            test_quantize.sample(n)[0], *INT8, test_quantize.sample(n)[1], None
        ),
    ),
    OpCase("dequantize", dequantize_reference, _dequantize),
    OpCase("dequantize_sum", dequantize_sum_reference, _dequantize_sum),
    OpCase(
        "mix_quantized_", mix_quantized_reference, lambda numel: test_mix_quantized.sample(numel, 2)
    ),
    OpCase(
        "quantize_difference_",
        quantize_difference_reference,
        lambda numel: test_quantize_difference.prepare(*test_quantize_difference.sample(numel)),
    ),
    OpCase("add_or_clear_", add_or_clear_reference, test_mix.sample_sum),
    OpCase(
        "screen_headers",
        screen_headers_reference,
        lambda numel: test_mix.sample_headers(min(numel, 40)),
        by_elements=False,
    ),
    OpCase("pack_signs", pack_signs_reference, test_pack_signs.sample),
    OpCase("unpack_signs", unpack_signs_reference, test_pack_signs.sample_message),
    OpCase("quantize_statistical", quantize_statistical_reference, test_pack_signs.sample_bins),
    OpCase(
        "dequantize_statistical", dequantize_statistical_reference, test_pack_signs.message_of_bins
    ),
    OpCase(
        "random_k_indices",
        random_k_indices_reference,
        lambda numel: test_random_k.sample_indices(numel, numel // 8),
        by_elements=False,
    ),
    OpCase(
        "random_k",
        random_k_reference,
        lambda numel: test_random_k.sample(numel, numel // 8),
        by_elements=False,
    ),
    OpCase(
        "top_k",
        top_k_reference,
        lambda numel: test_top_k.sample(numel, numel // 50),
        by_elements=False,
    ),
    OpCase(
        "scatter_add_",
        scatter_add_reference,
        lambda numel: test_top_k.message(numel, numel // 8),
        by_elements=False,
    ),
    OpCase("top_k_chunks", top_k_chunks_reference, test_top_k.sample_chunks, by_elements=False),
    OpCase(
        "scatter_chunks", scatter_chunks_reference, test_top_k.message_of_chunks, by_elements=False
    ),
    OpCase(
        "orthogonalize_",
        orthogonalize_reference,
        lambda numel: (test_orthogonalize.sample((max(4, numel // 4), 4)),),
        by_elements=False,
        tolerance=2e-6,
    ),
]


def synchronize() -> None:
    """Wait for the device, where errors of kernels appear."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return what replays a call from a CUDA graph; on the CPU the call itself."""
    if DEVICE.type == "cpu":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@contextlib.contextmanager
def side_stream():
    """Run the block on another stream, which begins 10 ms later; then the current one waits."""
    if DEVICE.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # cycles
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def no_synchronization():
    """Raise where the host waits for the device."""
    if DEVICE.type == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
