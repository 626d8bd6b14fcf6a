"""How much of a gossip message hides behind forward and backward, on one GPU in one process.

``python -m benchmarks.gossip.overlap_link``. Optimizer, buckets, headers and rounds are those of
``GossipDataParallel`` with ``SGP``; only the link is a stand-in. It copies each message to the
host's memory and back, on a stream of its own: by copy engines at the rate of PCIe, about that of a
card of 400 Gbit/s, and slower by so many ms a step as ``--slower`` says. The rank is its own
neighbor.

Of the times of a step alone, with the round after the update (``overlap=0``) and during the next
step (1), the hidden part is 1 - (t1 - t) / (t0 - t). ``--device cpu`` tests the program.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from benchmarks.harness.measure import CYCLES_PER_SECOND, FIELDS
from benchmarks.harness.program import make_parser
from benchmarks.harness.rows import Row, record, summary
from benchmarks.harness.turns import take_turns
from pyparallel import optim
from pyparallel.comm import Run
from pyparallel.comm.p2p import Pending, Transfer
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.push_sum.dense_buffer import DenseBuffer
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import Ring

HEADER_BYTES = 1024  # at most; such a message is not slowed
STEPS = 4  # of a turn
# width, layers, batch, length: of GPT-2 with 124 million parameters without its embedding
SIZES = {"cuda": (768, 12, 16, 1024), "cpu": (64, 2, 2, 16)}


class Arrival:
    """A work: the current stream waits until the link has copied."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def wait(self, *timeout: Any) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class Link(NeighborExchange):
    """An exchange whose messages come back; a byte is slower by some seconds."""

    def __init__(self, run: Run, slower: float, device: str) -> None:
        super().__init__(run)
        self.slower = slower
        self.stream = torch.cuda.Stream(priority=-1) if device == "cuda" else None
        self.on_host: dict[int, torch.Tensor] = {}  # by the address of a message on the GPU

    @override
    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        event = None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for sent, received in zip(sends, receives, strict=True):
                self.copy(sent.tensor, received.tensor)
            if self.stream is not None:
                event = self.stream.record_event()
        self.stats.count_bytes(sum(each.tensor.nbytes for each in sends))
        return Pending(self, [*receives, *sends], len(receives), [Arrival(event)])

    def copy(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        if self.stream is None or sent.nbytes <= HEADER_BYTES:
            received.copy_(sent)
            return
        if sent.data_ptr() not in self.on_host:
            self.on_host[sent.data_ptr()] = torch.empty_like(sent, device="cpu", pin_memory=True)
        through = self.on_host[sent.data_ptr()].copy_(sent, non_blocking=True)
        if self.slower:
            torch.cuda._sleep(int(self.slower * sent.nbytes * CYCLES_PER_SECOND))
        received.copy_(through, non_blocking=True)


class Training:
    """A transformer with its optimizer; ``overlap``: of the rounds, None without any."""

    def __init__(self, device: str, cap_mib: int, slower_ms: float, overlap: int | None) -> None:
        torch.manual_seed(0)
        width, num_layers, batch, length = SIZES[device]
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "device": device}
        heads = width // 64
        layers = [
            nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", **options)
            for _ in range(num_layers)
        ]
        self.device, self.model = device, nn.Sequential(*layers)
        self.x = torch.randn(batch, length, width, device=device)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-4)
        laid_out = self.optimizer.lay_out(cap_mib * 2**20)
        buffers = [buffer for weights in laid_out for buffer in weights.buffers]
        self.numel, self.rounds = sum(map(len, buffers)), None
        if overlap is not None:
            run = Run()
            run.size = 2  # of which the other is this one
            link = Link(run, slower_ms / 1e3 / (4 * self.numel), device)
            dense = [DenseBuffer(buffer, link) for buffer in buffers]
            self.rounds = rounds = PushSum(dense, link, Ring(2), overlap)
            self.optimizer.adopt(
                lambda each: rounds.step_buckets(each.step_bucket, each.num_buckets)
            )

    def step(self) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time_steps(self) -> float:
        """Return the seconds of a step, the mean of several."""
        synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        synchronize(self.device)
        return (time.perf_counter() - begin) / STEPS


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def hidden(alone: float, after: float, during: float) -> float:
    """Return the part of a round's time that is hidden during a step, of three steps' times."""
    return 1 - (during - alone) / (after - alone) if after > alone else float("nan")


def measure(
    device: str, cap_mib: int, slower_ms: float, turns: int, trace: Path | None
) -> list[Row]:
    """Return a row for each of the three; write a trace of two steps that hide their rounds."""
    make: Callable[..., Training] = partial(Training, device, cap_mib, slower_ms)
    trainings = {"step alone": make(None), "overlap=0": make(0), "overlap=1": make(1)}
    found = take_turns({name: each.time_steps for name, each in trainings.items()}, turns, 1)
    last = trainings["overlap=1"]
    if trace is not None:
        with torch.profiler.profile() as profiler:
            for _ in range(2):
                last.step()
            synchronize(device)
        profiler.export_chrome_trace(str(trace))
    for each in trainings.values():
        if each.rounds is not None:
            each.rounds.flush()
    case = f"buckets of {cap_mib} MiB, {slower_ms:g} ms slower"
    common = {"op": "overlap_link", "case": case, "device": device, "numel": last.numel}
    rows = [
        {**common, "provider": name, **summary(times, digits=4)} for name, times in found.items()
    ]
    print(f"{case}: hidden {hidden(*(float(row['median_ms']) for row in rows)):.3f}")
    return rows


def main() -> None:
    parser = make_parser("gossip.overlap_link", __doc__, "overlap-link")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--caps", nargs="+", type=int, default=[256, 64], help="MiB of a bucket")
    parser.add_argument("--slower", nargs="+", type=float, default=[0, 10, 20, 40], help="ms")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="of the first case, as json or json.gz")
    options = parser.parse_args()
    record(measure_all(options), options.out, FIELDS, key=("op", "case"))


def measure_all(options: Any) -> Iterator[list[Row]]:
    trace = options.trace
    for cap_mib in options.caps:
        for slower_ms in options.slower:
            yield measure(options.device, cap_mib, slower_ms, options.turns, trace)
            trace = None


if __name__ == "__main__":
    main()
