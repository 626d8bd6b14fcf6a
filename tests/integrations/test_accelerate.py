"""Scripts with Accelerate train as the same loop written by hand."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.libraries import load
from pyparallel import SGP, GossipDataParallel, topology
from pyparallel.compression import ErrorFeedback, TopK
from pyparallel.gossip import AllReduce
from tests.integrations.by_hand import assert_equal, checks, compressed_ddp
from tests.integrations.by_hand import train as train_by_hand
from tests.launched import forget_accelerate, launched

load("accelerate")
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
)

from pyparallel.integrations.accelerate import CompressedDDPKwargs, RankStates, prepare_gossip  # noqa: E402

NUM_BATCHES, BATCH_SIZE = 6, 4


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def samples():
    return torch.rand(2 * NUM_BATCHES * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(1))


def make_accelerator(**options):
    forget_accelerate()
    return Accelerator(cpu=True, **options)


def train(accelerator, model, optimizer, loader, max_norm=None):
    """Accelerate's quick start: an epoch of its loop."""
    losses = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch), batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            if max_norm and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def prepare(algorithm, **options):
    accelerator = make_accelerator(**options)
    model = make_model()
    model, optimizer = prepare_gossip(accelerator, model, make_optimizer(model), algorithm)
    loader = accelerator.prepare(DataLoader(TensorDataset(samples()), BATCH_SIZE))
    return accelerator, model, optimizer, loader


def batches_of(rank):
    """Return a rank's batches, of which Accelerate gives every second one to each rank."""
    return samples().split(BATCH_SIZE)[rank::2]


def by_hand(rank, wrap, epochs, **options):
    module = make_model()
    optimizer = make_optimizer(module)
    model, losses = wrap(module, optimizer), []
    for _ in range(epochs):
        losses += train_by_hand(model, [optimizer], batches_of(rank), **options)
    return losses, module, model


OPTIONS = [
    ({"gradient_accumulation_steps": 2}, {"accumulated": 2, "clip": 0.01}),
    ({"mixed_precision": "bf16"}, {"dtype": torch.bfloat16}),
]


OVERLAPPED = SGP(topology.Ring(2), overlap=1)
CASES = [(algorithm, *each) for algorithm in (OVERLAPPED, AllReduce()) for each in OPTIONS]


def check_options(rank, folder):
    check_gossip(rank, folder, [(AllReduce(), {}, {}), *CASES])


def check_gossip(rank, folder, cases=((OVERLAPPED, {}, {}),)):
    for algorithm, options, arguments in cases:

        def wrap(module, optimizer, algorithm=algorithm):
            return GossipDataParallel(module, optimizer, algorithm)

        expected, module, reference = by_hand(rank, wrap, 2, **arguments)
        accelerator, model, optimizer, loader = prepare(algorithm, **options)
        max_norm = arguments.get("clip")
        losses = train(accelerator, model, optimizer, loader, max_norm)
        losses += train(accelerator, model, optimizer, loader, max_norm)
        assert losses == expected, (algorithm, options)
        assert_equal(model.state_dict(), module.state_dict())
        assert model.bytes_sent == reference.bytes_sent > 0
        check_answers(accelerator, model, module)


def check_answers(accelerator, model, module):
    """Unwrap and save the trainer as Accelerate does DDP; what is saved is the exact average."""
    assert accelerator.unwrap_model(model) is model.module
    assert accelerator.unwrap_model(module, keep_fp32_wrapper=False) is module
    asked = (model, model.module)
    states = [copy.deepcopy(accelerator.get_state_dict(each)) for each in asked]
    assert_equal(model.state_dict(), module.state_dict())  # its own weights again
    assert_equal(accelerator.get_state_dict(module), module.state_dict())  # not prepared
    with model.consensus():
        if accelerator.is_main_process:  # which need not wait for the others here
            states.append(accelerator.get_state_dict(model))
    expected = average(model)
    for state in states:
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-7)


def average(model):
    """Return the sum of the ranks' w z over that of w, once nothing is in flight."""
    model.flush()
    weight = model.push_sum_weight.double()
    total = weight.clone()
    dist.all_reduce(total)
    averages = {}
    for key, tensor in model.state_dict().items():
        wide = tensor.double() * weight
        dist.all_reduce(wide)
        averages[key] = (wide / total).to(tensor.dtype)
    return averages


def check_gossip_resumes(rank, folder):
    accelerator, model, optimizer, loader = prepare(OVERLAPPED)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(folder)
    with model.consensus() as averaged:
        consensus = copy.deepcopy(averaged.state_dict())
    losses = train(accelerator, model, optimizer, loader)
    weights = copy.deepcopy(model.state_dict())
    accelerator, model, optimizer, loader = prepare(OVERLAPPED)
    accelerator.load_state(folder)
    assert train(accelerator, model, optimizer, loader) == losses
    assert_equal(model.state_dict(), weights)
    saved = load("safetensors.torch").load_file(f"{folder}/model.safetensors")
    assert_equal(saved, consensus)
    accelerator.save_model(model, f"{folder}/model")
    with model.consensus() as averaged:
        dist.barrier()
        saved = load("safetensors.torch").load_file(f"{folder}/model/model.safetensors")
        assert_equal(saved, averaged.state_dict())
    dist.barrier()
    if rank == 1:
        Path(folder, "custom-0.rank-1-of-2").unlink()
    dist.barrier()
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"rank 1: .*must hold custom-0\.rank-1-of-2: a run resumes"
    ):
        accelerator.load_state(folder)
    assert_equal(model.state_dict(), weights)


def check_shuffled(rank, folder):
    """Resume with a shuffled loader, as the page says."""

    def begin():
        sampling = DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator, model, optimizer, _ = prepare(OVERLAPPED, dataloader_config=sampling)
        loader = DataLoader(TensorDataset(samples()), BATCH_SIZE, shuffle=True)
        return accelerator, model, optimizer, accelerator.prepare(loader)

    accelerator, *whole = begin()
    train(accelerator, *whole)
    accelerator.save_state(folder)
    losses = train(accelerator, *whole)
    accelerator, *resumed = begin()
    accelerator.load_state(folder)
    resumed[-1].set_epoch(1)
    assert train(accelerator, *resumed) == losses


def check_compressed(rank, folder):
    compressor = ErrorFeedback(TopK(0.25))
    states = []

    def wrap(module, optimizer):
        ddp, state = compressed_ddp(module, compressor)
        states.append(state)
        return ddp

    expected, module, _ = by_hand(rank, wrap, 2)

    def prepare_compressed():
        handler = CompressedDDPKwargs(compressor=compressor, gradient_as_bucket_view=True)
        accelerator = make_accelerator(kwargs_handlers=[handler])
        model = make_model()
        loader = DataLoader(TensorDataset(samples()), BATCH_SIZE)
        prepared = accelerator.prepare(model, make_optimizer(model), loader)
        RankStates(accelerator, handler.state)
        return accelerator, *prepared, handler

    accelerator, model, optimizer, loader, handler = prepare_compressed()
    assert model.gradient_as_bucket_view
    losses = train(accelerator, model, optimizer, loader)
    accelerator.save_state(folder)
    losses += train(accelerator, model, optimizer, loader)
    assert losses == expected
    assert_equal(model.module.state_dict(), module.state_dict())
    sent = handler.state.metrics()["rank/bytes_sent"]
    assert sent == states[0].metrics()["rank/bytes_sent"] > 0
    accelerator, model, optimizer, loader, handler = prepare_compressed()
    accelerator.load_state(folder)
    assert train(accelerator, model, optimizer, loader) == expected[NUM_BATCHES:]
    assert_equal(model.module.state_dict(), module.state_dict())


def check_refusals(rank, folder):
    accelerator, module = make_accelerator(), make_model()
    wrapped = GossipDataParallel(module, make_optimizer(module), SGP(topology.Ring(2)))
    with pytest.raises(RuntimeError, match="GossipDataParallel must not be wrapped in Distributed"):
        accelerator.prepare(wrapped)
    accelerator = make_accelerator()
    prepared = accelerator.prepare(make_optimizer(module))
    with pytest.raises(TypeError, match="optimizer must not be prepared"):
        prepare_gossip(accelerator, module, prepared, SGP(topology.Ring(2)))
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ValueError, match="whole model on each rank, got distributed_type FSDP"):
        prepare_gossip(accelerator, module, make_optimizer(module), SGP(topology.Ring(2)))
    with pytest.raises(ValueError, match=r"algorithm must be an object .* got Ring\(2\)"):
        prepare(topology.Ring(2))
    with pytest.raises(ValueError, match="You can only pass one"):
        make_accelerator(kwargs_handlers=[CompressedDDPKwargs(), DistributedDataParallelKwargs()])
    with pytest.raises(ValueError, match="comm_hook must not be given to CompressedDDPKwargs"):
        CompressedDDPKwargs(comm_hook="fp16")


def run(rank, check, folder):
    launched(globals()[check])(rank, folder)


@checks("gossip", "options", "gossip_resumes", "shuffled", "compressed", "refusals")
def test_accelerate_trains_as_the_loop_by_hand(ranks, tmp_path, check):
    ranks.run(2, run, f"check_{check}", str(tmp_path))


def check_alone(rank, folder):
    with pytest.raises(ValueError, match="accelerator must have at least 2 processes, got 1"):
        prepare(SGP(topology.Ring(2)))
    handler = CompressedDDPKwargs()
    make_accelerator(kwargs_handlers=[handler]).prepare(make_model())
    with pytest.raises(RuntimeError, match="got no hook: nothing is compressed"):
        assert handler.state


def test_one_process_is_refused(ranks, tmp_path):
    ranks.run(1, check_alone, str(tmp_path))
