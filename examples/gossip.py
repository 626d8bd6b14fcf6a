"""Train by gossip: every rank averages its weights with one other rank, instead of with all.

    torchrun --standalone --nproc-per-node 4 examples/gossip.py
    torchrun --standalone --nproc-per-node 4 examples/gossip.py --algorithm osgp
    torchrun --standalone --nproc-per-node 4 examples/gossip.py --topology ring

Each rank learns scikit-learn's digits from its own part of the images: first by all-reduce, for
comparison, then by gossip. What is tested and saved is the mean of the ranks' weights.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from data import load_digits, share
from models import accuracy, digits_net
from pyparallel import GossipDataParallel, gossip, topology
from ranks import following, gather, join_ranks, log_metrics, make_parser
from show import draw, print_next, print_table, save_model, smooth

TOPOLOGIES = {
    "one-peer-exponential": topology.OnePeerExponential,
    "ring": topology.Ring,
    "base-graph": topology.BaseGraph,
}
ALGORITHMS = {
    "sgp": gossip.SGP,
    "osgp": gossip.OSGP,  # sends during the next batch
    "slowmo": lambda graph: gossip.SlowMo(gossip.SGP(graph), interval=24, momentum=0.2),
    "localsgd": lambda graph: gossip.LocalSGD(interval=8),  # of all ranks: no topology
}


def train(name, algorithm, options, images, labels, test):
    """Return a column of the table, the mean losses of all ranks, and the averaged weights."""
    torch.manual_seed(options.seed)
    network = digits_net().to(images.device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    model = GossipDataParallel(network, optimizer, algorithm)

    losses = []
    begin = time.perf_counter()
    bar = tqdm(range(options.epochs), name, disable=dist.get_rank() > 0)
    for _ in bar:
        for batch in torch.randperm(len(labels)).split(16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()  # the local step, then a round of averaging
            losses.append(loss.item())
            log_metrics(options.tensorboard, name, model.metrics(), len(losses))
        scheduler.step()
        bar.set_postfix(loss=f"{loss:.3f}")
    seconds = time.perf_counter() - begin

    distance = model.consensus_distance()
    with model.consensus() as averaged:  # the mean of all ranks, restored afterwards
        score = accuracy(averaged, *test)
        state = {key: tensor.clone() for key, tensor in averaged.state_dict().items()}

    column = [
        name,
        f"{100 * score:.1f} %",
        f"{1000 * seconds / len(losses):.1f}",
        f"{model.bytes_sent / len(losses) / 1000:.0f}",
        f"{distance:.1g}",
    ]
    losses_of_ranks = gather(losses)
    mean_losses = [sum(each) / len(each) for each in zip(*losses_of_ranks, strict=True)]
    return column, smooth(mean_losses), state


def main():
    parser = make_parser(__doc__, epochs=15)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="sgp")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="one-peer-exponential")
    options = parser.parse_args()
    device = join_ranks(options.seed)

    images, labels, *test = (tensor.to(device) for tensor in load_digits())
    images, labels = share(images, labels)
    graph = TOPOLOGIES[options.topology](dist.get_world_size())
    algorithm = ALGORITHMS[options.algorithm](graph)

    untrained = f"{100 * accuracy(digits_net().to(device), *test):.1f} %"
    exact, exact_losses, _ = train("all-reduce", gossip.AllReduce(), options, images, labels, test)
    ours, losses, state = train(options.algorithm, algorithm, options, images, labels, test)
    if dist.get_rank() == 0:
        report(options, untrained, exact, exact_losses, ours, losses, state)
    dist.destroy_process_group()


def report(options, untrained, exact, exact_losses, ours, losses, state):
    """Print the table, draw the losses and save the model."""
    name = options.algorithm
    headings = [
        "",
        "test accuracy",
        "ms per step",
        "kB a rank sends per step",
        "ranks differ by",
    ]
    title = f"{name}, {options.topology}, {dist.get_world_size()} ranks"
    print_table(title, headings, ("untrained", untrained), exact, ours)

    picture = draw(
        options.out / name,
        f"Does {name} learn as fast?",
        {"all-reduce": exact_losses, name: losses},
        "step",
        "training loss",
        yscale="log",
    )
    load = save_model(state, options.out / name, "digits_net()")
    print_next(
        "On one machine a step costs its computation; over slow links it costs its kB.",
        picture,
        load,
        f'make train-gossip ARGS="--algorithm {following(name, ALGORITHMS)}"',
    )


if __name__ == "__main__":
    main()
