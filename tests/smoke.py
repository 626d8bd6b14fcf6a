"""Try an installed pyparallel from any folder: torchrun --nproc-per-node 2 smoke.py.

It needs torch and pyparallel, no compiler and no other package.
"""

import torch
import torch.distributed as dist
from torch import nn

import pyparallel
from pyparallel import SGP, GossipDataParallel, PipelineTrainer, ops, topology
from pyparallel.compression import ErrorFeedback, TopK, compress_ddp
from pyparallel.pipeline import PipeOptim


def batch():
    inputs = torch.randn(32, 16)
    return inputs, inputs[:, :4].argmax(1)


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def train(model, optimizer):
    losses = []
    for _ in range(60):
        inputs, targets = batch()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gossip():
    module = make_layers()
    optimizer = pyparallel.optim.AdamW(module.parameters(), lr=1e-2)
    model = GossipDataParallel(module, optimizer, SGP(topology.Ring(dist.get_world_size())))
    return train(model, optimizer), model.bytes_sent


def hook():
    ddp = nn.parallel.DistributedDataParallel(make_layers())
    state = compress_ddp(ddp, ErrorFeedback(TopK(0.25)))
    losses = train(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2))
    return losses, state.metrics()["rank/bytes_sent"]


def pipeline():
    trainer = PipelineTrainer(
        make_layers(),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        PipeOptim(),
        num_microbatches=2,
        num_stages=2,
        split=[1],
    )
    torch.manual_seed(1)  # the first and the last stage have the same batches
    losses = [trainer.step(*batch()) for _ in range(60)]
    trainer.flush()
    return losses, trainer.metrics()["rank/bytes_sent"]


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    if rank == 0:
        serves, _ = ops.implementation("mix_", "cpu")
        print(f"pyparallel {pyparallel.__version__}, torch {torch.__version__}: {serves}")
    for run in (gossip, hook, pipeline):
        torch.manual_seed(rank)
        losses, sent = run()
        # other stages than the last know a batch's loss one step later
        first = losses[0] if rank == dist.get_world_size() - 1 else losses[1]
        assert losses[-1] < 0.8 * first, f"{run.__name__}: loss {first}, {losses[-1]}"
        assert sent > 0, f"{run.__name__} has sent nothing"
        if rank == dist.get_world_size() - 1:
            print(
                f"{run.__name__}: loss {losses[0]:.2f} to {losses[-1]:.2f}, {sent:.0f} bytes sent"
            )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
