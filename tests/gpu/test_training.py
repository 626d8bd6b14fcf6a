"""Hooks, gossip and optimizers with their tensors on a GPU, which all ranks share."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel import optim
from pyparallel.comm import DisagreementError
from pyparallel.compression import (
    DGC,
    Cast,
    ErrorFeedback,
    Int8,
    Natural,
    PowerSGD,
    RandomK,
    Sign,
    Ternary,
    TopK,
    compress_ddp,
)
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import OnePeerExponential
from tests.compression.catalog import CATALOG
from tests.gossip.graphs import StarWithChords
from tests.gossip.push_sum.test_compressed_buffer import COMPRESSORS, compressed
from tests.gpu.catalog import DEVICE, no_synchronization
from tests.local_transport import run_threads

SHAPES = [(40, 30), (40,), (8, 40), (), (7,)]
# Wire lengths that vary are exchanged through the host.
FIXED = [
    *(Cast(), Int8(), ErrorFeedback(Int8()), ErrorFeedback(Sign()), Natural(), Ternary(seed=1)),
    *(ErrorFeedback(TopK(0.05)), ErrorFeedback(RandomK(0.3)), PowerSGD(2), DGC(0.05)),
]


class Given(nn.Module):
    """A model whose gradients are its inputs, so that they have the same bits on all devices."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients):
        return sum((part * given).sum() for part, given in zip(self.parts, gradients, strict=True))


def given(rank, step, device):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


def averaged(compressor, rank, device, steps, group=None):
    """Return the gradients after the last step of DDP with the hook of a compressor."""
    ddp = DistributedDataParallel(Given().to(device), process_group=group)
    compress_ddp(ddp, compressor)
    for step in range(steps):
        ddp.zero_grad()
        ddp(given(rank, step, device)).backward()
    return [parameter.grad.cpu() for parameter in ddp.parameters()]


def compare_devices(rank):
    """Return problems, and the number of compressors that DDP takes."""
    problems, count = [], 0
    for row in CATALOG:
        for compressor in row.compressors:
            try:
                expected = averaged(compressor, rank, torch.device("cpu"), 3)
            except DisagreementError:
                continue  # it cannot be used in DDP
            count += 1
            try:
                actual = averaged(compressor, rank, DEVICE, 3)
            except RuntimeError as error:  # on all ranks alike: the others are still tried
                problems.append(f"{compressor}: {error}")
                continue
            close = [
                torch.allclose(mine, other, rtol=1e-4, atol=1e-4)
                for mine, other in zip(actual, expected, strict=True)
            ]
            problems += [] if all(close) else [f"{compressor}: {close}"]
    return problems, count


@pytest.mark.slow
def test_gradients_of_every_compressor_are_those_of_the_cpu(ranks):
    # Gloo takes tensors on GPUs; its ranks may share one.
    for problems, count in ranks.run(3, compare_devices, time_limit=150):
        assert not problems
        assert count >= 30


def gossip_rounds(make, topology, device):
    """Return all ranks' buffers after five rounds; the ranks are threads."""

    def rank_main(exchange):
        generator = torch.Generator().manual_seed(exchange.rank)
        buffers = [torch.randn(n, generator=generator).to(device) for n in (5003, 33)]
        averaging = make(buffers, exchange, topology)
        for _ in range(5):
            averaging.after_step()
        averaging.flush()
        return [buffer.cpu() for buffer in buffers]

    return run_threads(topology.num_ranks, rank_main)


def test_gossip_has_the_bits_of_the_cpu():
    makers = [PushSum.of_dense, lambda *arguments: PushSum.of_dense(*arguments, overlap=2)]
    for each in COMPRESSORS:
        makers += [lambda *arguments, each=each: compressed(*arguments, each)]
    for topology in (OnePeerExponential(4), StarWithChords(3)):
        for i, make in enumerate(makers):
            expected = gossip_rounds(make, topology, torch.device("cpu"))
            for mine, other in zip(gossip_rounds(make, topology, DEVICE), expected, strict=True):
                for actual, wanted in zip(mine, other, strict=True):
                    assert torch.equal(actual, wanted), (topology, i)


@pytest.fixture
def group(tmp_path):
    """Join a group of this process alone: on a GPU of NCCL, whose kernels then run."""
    options = {"rank": 0, "world_size": 1, "timeout": datetime.timedelta(seconds=60)}
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", **options)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_step_of_ddp_never_stops_the_host(group):
    problems = []
    for compressor in FIXED:
        ddp = DistributedDataParallel(Given().to(DEVICE))
        compress_ddp(ddp, compressor)
        inputs = [given(0, step, DEVICE) for step in range(6)]
        for each in inputs[:3]:  # buckets are rebuilt after the first step
            ddp(each).backward()
        for each in inputs[3:]:
            try:
                with no_synchronization():
                    ddp(each).backward()
            except RuntimeError as error:
                problems.append(f"{compressor}: {error}")
                break
    assert not problems, "\n".join(problems)


def steps_of(optimizer_class, device, num_steps, run=lambda step: step()):
    torch.manual_seed(0)
    parameters = [torch.randn(shape).to(device).requires_grad_() for shape in SHAPES]
    optimizer = optimizer_class(parameters, lr=torch.tensor(1e-2, device=device))
    for step in range(num_steps):
        for parameter, grad in zip(parameters, given(0, step, device), strict=True):
            parameter.grad = grad
        (run if step > 1 else lambda first: first())(optimizer.step)
    return [parameter.detach().cpu() for parameter in parameters]


def test_optimizers_agree_with_the_cpu_and_do_not_stop_the_host():
    def run(step):
        with no_synchronization():
            step()

    for kind in (optim.AdamW, optim.SGD):
        expected = steps_of(kind, torch.device("cpu"), 5)
        steps_of(kind, DEVICE, 1)  # compiles
        for mine, other in zip(steps_of(kind, DEVICE, 5, run), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
