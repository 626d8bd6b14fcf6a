"""Train a classifier of handwritten digits on several ranks that average only with neighbors.

    make train
    torchrun --standalone --nproc-per-node 4 examples/train_gossip.py --topology ring
    torchrun --standalone --nproc-per-node 4 examples/train_gossip.py --algorithm osgp
    torchrun --standalone --nproc-per-node 4 examples/train_gossip.py --slow-rank 2:3

The data are scikit-learn's 1,797 digits of 8 x 8 pixels, which need no download. Rank 0 prints a
table and writes gossip.png (loss and consensus distance) and gossip.pt (the consensus model, which
loads into the bare module) to --out.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

from pyparallel import GossipDataParallel, topology
from pyparallel.gossip import (
    ADPSGD,
    DPSGD,
    SGP,
    AllReduce,
    DiLoCo,
    Hierarchical,
    LeaderSGD,
    LocalSGD,
    NoLoCo,
    SlowMo,
)

TOPOLOGIES = {
    "ring": topology.Ring,
    "one-peer-exponential": topology.OnePeerExponential,
    "directed-exponential": topology.DirectedExponential,
    "complete": topology.Complete,
    "base-graph": topology.BaseGraph,
    "random-matching": topology.RandomMatching,
    "torus": topology.Torus,
    "star": topology.Star,
}
ALGORITHMS = {  # what each makes of a topology
    "sgp": SGP,
    "osgp": lambda graph: SGP(graph, overlap=1),
    "dpsgd": lambda graph: DPSGD(topology.Ring(graph.num_ranks)),
    "adpsgd": lambda graph: ADPSGD(topology.Ring(graph.num_ranks)),
    "localsgd": lambda graph: LocalSGD(interval=8),
    "slowmo": lambda graph: SlowMo(SGP(graph), interval=24, momentum=0.2),
    "diloco": lambda graph: DiLoCo(interval=24),
    "leadersgd": lambda graph: LeaderSGD(node_size(graph), interval=1, global_interval=4),
    "noloco": lambda graph: NoLoCo(topology.RandomMatching(graph.num_ranks), interval=8),
    "hierarchical": lambda graph: Hierarchical(
        SGP(type(graph)(graph.num_ranks // node_size(graph)), overlap=1), node_size(graph)
    ),
    "allreduce": lambda graph: AllReduce(),
}
NUM_TEST = 360  # of 1,797: the last fifth of a fixed shuffle


def node_size(graph: topology.Topology) -> int:
    """Pretend that every two ranks are a node, where their number is even."""
    return 2 - graph.num_ranks % 2


@dataclass
class History:
    """What this rank saw, one entry per step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    distances: list[tuple[int, float]] = field(default_factory=list)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="sgp")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="one-peer-exponential")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--slow-rank", metavar="R:FACTOR", type=parse_slow_rank, help="make rank R a straggler"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gossip"))
    return parser.parse_args()


def parse_slow_rank(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    try:
        parsed = int(rank), float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be R:FACTOR, for example 2:3, got {text}") from None
    if parsed[0] < 0 or parsed[1] < 1:
        raise argparse.ArgumentTypeError(f"must be R >= 0 and FACTOR >= 1, got {text}")
    return parsed


def load_data(device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """This rank's share of the training digits, and all test digits; the same split everywhere."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    mine = order[: len(labels) - NUM_TEST][dist.get_rank() :: dist.get_world_size()]
    test = order[len(labels) - NUM_TEST :]
    return (images[mine], labels[mine]), (images[test], labels[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, options) -> GossipDataParallel:
    graph = TOPOLOGIES[options.topology](dist.get_world_size())
    return GossipDataParallel(model, optimizer, ALGORITHMS[options.algorithm](graph))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def train(model, optimizer, data, options) -> History:
    """The user's own loop: nothing in it knows of gossip but what it records and measures."""
    images, labels = data
    history = History()
    shuffle = torch.Generator().manual_seed(options.seed * 1000 + dist.get_rank())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    first = dist.get_rank() == 0
    for epoch in tqdm(range(options.epochs), desc="epochs", disable=not first):
        order = torch.randperm(len(labels), generator=shuffle).to(labels.device)
        with model.join():  # ranks may have unequal numbers of batches
            for batch in order.split(options.batch_size):
                begin = time.perf_counter()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                model.record_loss(loss)  # only LeaderSGD has a use for it
                linger(begin, options)
                optimizer.step()
                history.losses.append(loss.item())
                history.seconds.append(time.perf_counter() - begin)
        scheduler.step()
        history.distances.append((epoch + 1, model.consensus_distance()))
    return history


def linger(begin: float, options) -> None:
    """Make a straggler of the chosen rank: sleep until FACTOR times the time of the computing."""
    if options.slow_rank and options.slow_rank[0] == dist.get_rank():
        time.sleep((options.slow_rank[1] - 1) * (time.perf_counter() - begin))


def gather(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def draw(path: Path, title: str, histories: list[History]) -> None:
    import matplotlib  # noqa: PLC0415  only rank 0 pays for the import

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for rank, history in enumerate(histories):
        left.plot(smooth(history.losses), label=f"rank {rank}", linewidth=1)
    left.set(xlabel="step", ylabel="training loss (mean of 10 steps)", yscale="log")
    left.legend()
    steps_per_epoch = len(histories[0].losses) / len(histories[0].distances)
    steps = [epoch * steps_per_epoch for epoch, _ in histories[0].distances]
    right.plot(steps, [value for _, value in histories[0].distances], color="black")
    right.set(xlabel="step", ylabel="consensus distance (RMS over ranks)", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def smooth(values: list[float], window: int = 10) -> list[float]:
    return [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i - window + 1) : i + 1])
    ]


def report(model, data, history: History, options) -> None:
    """Measure the ranks and their consensus; rank 0 prints, draws and saves."""
    own = accuracy(model.module, *data)
    with model.consensus() as averaged:
        consensus = accuracy(averaged, *data)
        weights = {name: tensor.clone() for name, tensor in averaged.state_dict().items()}
    distance = model.consensus_distance()
    accuracies, histories = gather(own), gather(history)
    step_bytes = model.bytes_sent / len(history.losses)
    if dist.get_rank() != 0:
        return
    seconds = sorted(history.seconds)
    title = f"{model.algorithm}, {dist.get_world_size()} ranks, seed {options.seed}"
    rows = [
        ("test accuracy, consensus", f"{consensus:.2%}"),
        *((f"test accuracy, rank {rank}", f"{value:.2%}") for rank, value in enumerate(accuracies)),
        ("consensus distance", f"{distance:.3g}"),
        ("steps per rank", f"{len(history.losses)}"),
        ("seconds per step, median", f"{seconds[len(seconds) // 2]:.4f}"),
        ("bytes sent per step and rank", f"{step_bytes:,.0f}"),
    ]
    print_table(title, rows)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(options.out / "gossip.png", title, histories)
    torch.save(weights, options.out / "gossip.pt")
    print(f"\npicture: {options.out / 'gossip.png'}\ncheckpoint: {options.out / 'gossip.pt'}")


def main() -> None:
    options = parse_arguments()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else None
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed)
    train_data, test_data = load_data(device)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), options.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    model = wrap(model, optimizer, options)
    history = train(model, optimizer, train_data, options)
    report(model, test_data, history, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
