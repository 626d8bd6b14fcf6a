"""What blocks that hold an SM each cost the computation beside them, as NCCL's do while they wait.

``python -m benchmarks.ops.held_sms``, on a GPU. There is no NCCL and no link: thread blocks that
only wait stand in for those of a message on a link of any speed. A matrix product has a block for
each SM; if one is held, a block runs after all others, and the product may take twice as long. With
a carve-out torch leaves as many SMs free. Without a GPU the computations run alone, which tests the
program.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from benchmarks.harness.measure import FIELDS, Time, time_once
from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import Row, record, summary
from benchmarks.harness.turns import take_turns

# The first of the flags ends all blocks; each of the others says that one block runs.
SOURCE = """
extern "C" __global__ void hold(volatile int* flags, int most_cycles) {
  if (threadIdx.x == 0) {
    flags[1 + blockIdx.x] = 1;
    __threadfence_system();
    const long long begin = clock64();
    while (flags[0] == 0 && clock64() - begin < most_cycles) {}
  }
}
"""
COUNTS = [0, 1, 2, 4, 8, 16, 32]
SHARED_BYTES = 180 * 1024  # of a block: none of a matrix product fits beside it
MOST_CYCLES = 1_000_000_000  # half a second: a block ends even if nothing ends it
SECONDS_TO_START = 0.05
SLEEP = 1e-2

Hold = Callable[[int], None]  # starts as many blocks


@contextmanager
def held(count: int, hold: Hold | None, flags: torch.Tensor) -> Iterator[None]:
    """Have blocks hold an SM each meanwhile; RuntimeError if not all of them run."""
    flags.zero_()
    if hold is not None and count:
        hold(count)
        deadline = time.monotonic() + SECONDS_TO_START
        while int(flags[1:].sum()) < count and time.monotonic() < deadline:
            pass
        if (running := int(flags[1:].sum())) < count:
            flags[0] = 1
            raise RuntimeError(f"{running} of {count} blocks run")
    try:
        yield
    finally:
        flags[0] = 1
        if hold is not None:
            torch.cuda.synchronize()


def compile_hold(flags: torch.Tensor) -> Hold:
    """Compile the blocks, which need pinned flags, and start them on a stream of their own."""
    kernel = torch.cuda._compile_kernel(SOURCE, "hold")
    kernel.set_shared_memory_config(SHARED_BYTES)
    stream = torch.cuda.Stream(priority=-1)

    def hold(count: int) -> None:
        options = {"shared_mem": SHARED_BYTES, "stream": stream}
        kernel((count, 1, 1), (512, 1, 1), [flags, MOST_CYCLES], **options)

    return hold


@contextmanager
def carved_out(count: int) -> Iterator[None]:
    """Have matrix products leave SMs free."""
    torch._C._set_sm_carveout_experimental(count or None)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


def computations(device: str) -> dict[str, Callable[[], None]]:
    """Return matrix products, and a layer's forward and backward, of 1/64 the size on the CPU."""
    part = 1 if device == "cuda" else 64

    def products(count: int, *sizes: int) -> Callable[[], None]:
        rows, inner, columns = (size // part for size in sizes)
        left = torch.randn(rows, inner, device=device).bfloat16()
        right = torch.randn(inner, columns, device=device).bfloat16()

        def multiply() -> None:
            for _ in range(count):
                torch.mm(left, right)

        return multiply

    width, length = 2048 // part, 1024 // part
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(width, 16, 4 * width, **options, device=device).bfloat16()
    x = torch.randn(8, length, width, device=device, dtype=torch.bfloat16)

    def forward_and_backward() -> None:
        layer(x).sum().backward()

    return {
        "8 products of 4096": products(8, 4096, 4096, 4096),
        "4 products of 8192 x 4096 and 8192": products(4, 8192, 4096, 8192),
        "8 products of 8192 x 8192 and 2048": products(8, 8192, 8192, 2048),
        "layer, forward and backward": forward_and_backward,
    }


def measure(device: str, turns: int) -> Iterator[list[Row]]:
    """Yield the rows of a computation; the ratio is to the time alone."""
    flags = torch.zeros(1 + max(COUNTS), dtype=torch.int32, pin_memory=device == "cuda")
    hold = compile_hold(flags) if device == "cuda" else None

    def run(compute: Callable[[], None], count: int, carved: int) -> Time:
        with carved_out(carved), held(count, hold, flags):
            return time_once(compute, device, sleep=SLEEP)

    both = sorted({(count, carved) for count in COUNTS for carved in (0, count)})
    for name, compute in computations(device).items():
        for carved in COUNTS:  # loads kernels, which may wait for blocks that run
            with carved_out(carved):
                compute()
        runs = {each: partial(run, compute, *each) for each in both if hold or each == (0, 0)}
        found = take_turns(runs, turns)
        rows = []
        for (count, carved), times in found.items():
            row = {"op": "held_sms", "case": name, "device": device, "numel": 0}
            row["provider"] = f"{count} held, {carved} carved out"
            row |= summary([each.device for each in times], digits=4)
            alone = float(rows[0]["median_ms"] if rows else row["median_ms"])
            row["speedup_of_ours"] = f"{float(row['median_ms']) / max(alone, 1e-4):.3f}"
            rows.append(row)
        yield rows


def main() -> None:
    parser = make_parser("ops.held_sms", __doc__, "held-sms")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    batches = measure(options.device, options.turns)
    record(batches, options.out, FIELDS, key=("op", "case"))


if __name__ == "__main__":
    main()
