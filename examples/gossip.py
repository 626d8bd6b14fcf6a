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
    torch.manual_seed(options.seed)
    network = digits_net().to(images.device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    model = GossipDataParallel(network, optimizer, algorithm)
    losses, begin = [], time.perf_counter()
    for _ in (bar := tqdm(range(options.epochs), name, disable=dist.get_rank() > 0)):
        for batch in torch.randperm(len(labels)).split(16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()  # the local step, then a round of averaging
            losses.append(loss.item())
            log_metrics(options.tensorboard, name, model.metrics(), len(losses))
        scheduler.step()
        bar.set_postfix(loss=f"{loss:.3f}")
    ms, distance = 1000 * (time.perf_counter() - begin) / len(losses), model.consensus_distance()
    with model.consensus() as averaged:  # the mean of all ranks, restored afterwards
        score = accuracy(averaged, *test)
        state = {key: tensor.clone() for key, tensor in averaged.state_dict().items()}
    costs = f"{ms:.1f}", f"{model.bytes_sent / len(losses) / 1000:.0f}", f"{distance:.1g}"
    means = [sum(each) / len(each) for each in zip(*gather(losses), strict=True)]
    return [name, f"{100 * score:.1f} %", *costs], smooth(means), state


def main():
    parser = make_parser(__doc__, epochs=15)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="sgp")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="one-peer-exponential")
    options = parser.parse_args()
    device = join_ranks(options.seed)
    images, labels, *test = (tensor.to(device) for tensor in load_digits())
    data = options, *share(images, labels), test
    algorithm = ALGORITHMS[options.algorithm](TOPOLOGIES[options.topology](dist.get_world_size()))
    before = f"{100 * accuracy(digits_net().to(device), *test):.1f} %"
    exact, exact_losses, _ = train("all-reduce", gossip.AllReduce(), *data)
    ours, losses, state = train(options.algorithm, algorithm, *data)
    if dist.get_rank() == 0:
        rows = "", "test accuracy", "ms per step", "kB a rank sends per step", "ranks differ by"
        title = f"{options.algorithm}, {options.topology}, {dist.get_world_size()} ranks"
        print_table(title, rows, ("untrained", before), exact, ours)
        curves = {"all-reduce": exact_losses, options.algorithm: losses}
        labels = f"Does {options.algorithm} learn as fast?", curves, "step", "training loss"
        picture = draw(options.out / options.algorithm, *labels, yscale="log")
        note = "On one machine a step costs its computation; over slow links it costs its kB."
        load = save_model(state, options.out / options.algorithm, "digits_net()")
        other = following(options.algorithm, ALGORITHMS)
        print_next(note, picture, load, f'make train-gossip ARGS="--algorithm {other}"')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
