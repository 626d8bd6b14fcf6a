"""Microseconds of a call of every op: the public function, the raw overload, and torch's nearest.

``python -m benchmarks.ops.calls`` calls each op on 64 and on 64 Ki float32 numbers. The public
function checks its arguments; the raw overload, ``torch.ops.pyparallel.X.default``, gets the
arguments that the public function gave it. Rows go to ``benchmarks/results/calls-<machine>.csv``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from benchmarks.harness.measure import time_once
from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import Row, machine, record, summary
from benchmarks.harness.turns import take_turns
from pyparallel import ops

SIZES, TURNS = (64, 2**16), 40
FIELDS = ["op", "numel", "provider", "median_us", "p20_us", "p80_us", "threads", "torch", "commit"]
PUBLIC, RAW = "public function", "raw overload"
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Call:
    """A call of an op, and the nearest that torch has, with its name; None: nothing does that."""

    op: str
    run: Callable[[], object]
    peer: str = ""
    run_peer: Callable[[], object] | None = None


class _Recorder(TorchDispatchMode):
    """Keeps the calls of this project's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "pyparallel":
            self.calls.append(partial(func, *args))
        return func(*args, **(kwargs or {}))


def raw_overload(call: Call) -> Callable[[], object]:
    """Return the raw overload with the arguments that the public function gives it.

    ``random_k`` calls two ops.
    """
    with _Recorder() as recorder:
        call.run()
    first, *others = recorder.calls

    def run() -> None:
        first()
        for other in others:
            other()

    return run if others else first


def double(*numbers: float) -> Tensor:
    """Return a number as 0-d float64, several as 1-d."""
    return torch.tensor(numbers if len(numbers) > 1 else numbers[0], dtype=torch.float64)


def steps(numel: int) -> list[Call]:
    """Return the optimizer steps, with a message in, one out and a prediction, and predictions."""
    param, grad, mean, out, incoming, message = (torch.randn(numel) for _ in range(6))
    square, step, flag = torch.rand(numel), torch.tensor(1.0), torch.tensor(False)
    around: dict[str, Any] = {
        "lr": double(1e-3), "horizon": double(2), "mass": double(1), "messages": [incoming],
        "masses": torch.zeros(1, dtype=torch.float64), "prediction": out, "message": message,
    }  # fmt: skip
    betas = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    adam = {**betas, "weight_decay": 0.0, "step": double(1)}
    fused = {"lr": 1e-3, "weight_decay": 0.0, "maximize": False}
    momentum = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    lists, alone = ([param], [grad], [mean]), "without messages and prediction"
    numbers = {"lr": double(1e-3), "horizon": double(2), "out": out}

    def fused_adamw() -> None:
        torch._fused_adamw_(*lists, [square], [], [step], **betas, **fused, amsgrad=False)

    return [
        Call(
            "adamw_step_", lambda: ops.adamw_step_(param, grad, mean, square, **adam, **around),
            f"_fused_adamw_, {alone}", fused_adamw,
        ),
        Call(
            "sgd_step_", lambda: ops.sgd_step_(param, grad, mean, momentum=0.9, **around),
            f"_fused_sgd_, {alone}", lambda: torch._fused_sgd_(*lists, **momentum, **fused),
        ),
        Call("clear_nonfinite_", lambda: ops.clear_nonfinite_([param], flag)),
        Call(
            "predict_adam",
            lambda: ops.predict_adam(param, mean, square, **betas, step=double(1), **numbers),
            "addcdiv", lambda: torch.addcdiv(param, mean, square, value=-1e-3, out=out),
        ),
        Call(
            "predict_sgd", lambda: ops.predict_sgd(param, mean, **numbers),
            "add", lambda: torch.add(param, mean, alpha=-2e-3, out=out),
        ),
    ]  # fmt: skip


def messages(numel: int) -> list[Call]:
    """Return mixing, and encoding and decoding of messages with a scale per block."""
    z, message, residual, replica, out = (torch.randn(numel) for _ in range(5))
    mass, masses, ratio = double(1), torch.zeros(1, dtype=torch.float64), double(0)
    block = {"block_size": BLOCK_SIZE}
    kind: dict[str, Any] = {"bits": 8, **block}
    codes, scales = ops.quantize(z, **kind)
    words, signs = ops.pack_signs(z, **block)
    bins, means = ops.quantize_statistical(z)
    blocks = z.view(-1, BLOCK_SIZE)
    row, counter = torch.zeros(1, 8, dtype=torch.float64), torch.tensor(0)
    expected = row.cpu()  # read on the host
    channels = scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0, torch.qint8
    encoded = torch.quantize_per_channel(blocks, *channels)
    decoded = {"numel": numel, "out": out}
    return [
        Call("mix_", lambda: ops.mix_(z, mass, [message], masses),
             "lerp_", lambda: z.lerp_(message, 0)),
        Call("mix_quantized_",
             lambda: ops.mix_quantized_(z, mass, [codes], [scales], masses, **kind)),
        Call("quantize_difference_",
             lambda: ops.quantize_difference_(z, replica, ratio, **kind, out=(codes, scales))),
        Call("quantize", lambda: ops.quantize(z, **kind, residual=residual),
             "quantize_per_channel, with given scales",
             lambda: torch.quantize_per_channel(blocks, *channels)),
        Call("dequantize", lambda: ops.dequantize(codes, scales, **kind, **decoded),
             "dequantize", lambda: torch.dequantize(encoded)),
        Call("dequantize_sum",
             lambda: ops.dequantize_sum(codes[None], scales[None], **kind, **decoded)),
        Call("screen_headers", lambda: ops.screen_headers(row, expected, counter=counter)),
        Call("add_or_clear_", lambda: ops.add_or_clear_(z, residual, times=0.0),
             "add_", lambda: z.add_(residual, alpha=0.0)),
        Call("pack_signs", lambda: ops.pack_signs(z, **block, residual=residual)),
        Call("unpack_signs", lambda: ops.unpack_signs(words, signs, **block, **decoded)),
        Call("quantize_statistical", lambda: ops.quantize_statistical(z, residual=residual)),
        Call("dequantize_statistical", lambda: ops.dequantize_statistical(bins, means, **decoded)),
    ]  # fmt: skip


def entries(numel: int) -> list[Call]:
    """Return the ops with indices, on one entry of sixteen, and ``orthogonalize_``."""
    x, residual, dense = (torch.randn(numel) for _ in range(3))
    k = numel // 16
    values, indices = ops.top_k(x, k)
    of_chunks = ops.top_k_chunks(x)
    matrix = torch.randn(numel // 4, 4)
    return [
        Call("top_k", lambda: ops.top_k(x, k, residual=residual),
             "topk", lambda: torch.topk(x, k)),
        Call("scatter_add_", lambda: ops.scatter_add_(dense, values, indices),
             "index_add_", lambda: dense.index_add_(0, indices, values)),
        Call("top_k_chunks", lambda: ops.top_k_chunks(x, residual=residual)),
        Call("scatter_chunks", lambda: ops.scatter_chunks(*of_chunks, numel=numel, out=dense)),
        Call("random_k_indices", lambda: ops.random_k_indices(numel, k, seed=1),
             "randperm", lambda: torch.randperm(numel)[:k]),
        Call("random_k", lambda: ops.random_k(x, k, seed=1, residual=residual),
             "index_select of a randperm",
             lambda: x.index_select(0, torch.randperm(numel)[:k])),
        Call("orthogonalize_", lambda: ops.orthogonalize_([matrix]),
             "linalg.qr", lambda: torch.linalg.qr(matrix)),
    ]  # fmt: skip


def measure(call: Call, numel: int, turns: int, repeats: int) -> list[Row]:
    providers = {PUBLIC: call.run, RAW: raw_overload(call)}
    if call.run_peer:
        providers[f"torch {call.peer}"] = call.run_peer
    runs = {name: partial(time_once, run, "cpu", repeats) for name, run in providers.items()}
    return [
        {
            "op": call.op,
            "numel": numel,
            "provider": name,
            **summary([each.device for each in times], "us", digits=2),
            "threads": torch.get_num_threads(),
        }
        for name, times in take_turns(runs, turns).items()
    ]


def main() -> None:
    options = make_parser("ops.calls", __doc__, f"calls-{machine()}").parse_args()
    batches = (
        measure(call, numel, TURNS, repeats=max(8, 2**14 // numel))
        for numel in SIZES
        for make in (steps, messages, entries)
        for call in make(numel)
    )
    record(batches, options.out, FIELDS)


if __name__ == "__main__":
    main()
