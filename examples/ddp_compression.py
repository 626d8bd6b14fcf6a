"""Send fewer bytes: DistributedDataParallel with compressed gradients.

    torchrun --standalone --nproc-per-node 4 examples/ddp_compression.py
    torchrun --standalone --nproc-per-node 4 examples/ddp_compression.py --compressor powersgd

Each rank learns scikit-learn's digits from its own part of the images: first without compression,
for comparison. Error feedback adds what a message leaves out to the next one.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from data import load_digits, share
from models import accuracy, count, digits_net
from pyparallel.compression import ErrorFeedback, Int8, PowerSGD, Sign, TopK, compress_ddp
from ranks import following, join_ranks, log_metrics, make_parser
from show import draw, print_next, print_table, save_model

COMPRESSORS = {
    "top-k": ErrorFeedback(TopK(0.01)),  # the largest 1 % of the entries
    "powersgd": ErrorFeedback(PowerSGD(rank=2)),  # two narrow factors of each matrix
    "int8": ErrorFeedback(Int8()),  # 8 bits an entry
    "sign": ErrorFeedback(Sign()),  # 1 bit an entry
}


def train(name, compressor, options, images, labels, test):
    """Return a column of the table, the accuracy over the megabytes sent, and the weights."""
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(digits_net().to(images.device))
    if compressor is not None:
        compression = compress_ddp(model, compressor)  # the loop below is that of plain DDP
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    all_reduce_bytes = 8 * (1 - 1 / dist.get_world_size()) * count(model)
    num_steps = 0
    sent = 0.0
    seconds = 0.0
    scores = []
    bar = tqdm(range(options.epochs), name, disable=dist.get_rank() > 0)
    for epoch in bar:
        begin = time.perf_counter()
        for batch in torch.randperm(len(labels)).split(16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            num_steps += 1
            sent += all_reduce_bytes if compressor is None else compression.last_step.wire_bytes
        scheduler.step()
        seconds += time.perf_counter() - begin

        if compressor is not None:
            log_metrics(options.tensorboard, name, compression.metrics(), epoch)
        bar.set_postfix(loss=f"{loss:.3f}")
        scores.append((sent / 1e6, 100 * accuracy(model.module, *test)))

    _, last_score = scores[-1]
    column = [
        name,
        f"{last_score:.1f} %",
        f"{1000 * seconds / num_steps:.1f}",
        f"{sent / num_steps / 1e3:.1f}",
    ]
    return column, scores, model.module.state_dict()


def main():
    parser = make_parser(__doc__, epochs=20)
    parser.add_argument("--compressor", choices=COMPRESSORS, default="top-k")
    options = parser.parse_args()
    device = join_ranks(options.seed)

    images, labels, *test = (tensor.to(device) for tensor in load_digits())
    images, labels = share(images, labels)
    compressor = COMPRESSORS[options.compressor]

    untrained = f"{100 * accuracy(digits_net().to(device), *test):.1f} %"
    exact, exact_scores, _ = train("all-reduce", None, options, images, labels, test)
    ours, scores, state = train(options.compressor, compressor, options, images, labels, test)
    if dist.get_rank() == 0:
        report(options, untrained, exact, exact_scores, ours, scores, state)
    dist.destroy_process_group()


def report(options, untrained, exact, exact_scores, ours, scores, state):
    """Print the table, draw the accuracy over the bytes, and save the model."""
    name = options.compressor
    headings = ["", "test accuracy", "ms per step", "kB a rank sends per step"]
    title = f"{name}, {dist.get_world_size()} ranks"
    print_table(title, headings, ("untrained", untrained), exact, ours)

    picture = draw(
        options.out / name,
        "What does accuracy cost?",
        {"all-reduce": exact_scores, name: scores},
        "MB sent by a rank",
        "test accuracy, %",
        xscale="log" if dist.get_world_size() > 1 else "linear",  # one rank sends nothing
        ylim=(0, 102),
    )
    load = save_model(state, options.out / name, "digits_net()")
    print_next(
        "On one machine compressing costs time; over slow links it saves the time of the kB.",
        picture,
        load,
        f'make train-compression ARGS="--compressor {following(name, COMPRESSORS)}"',
    )


if __name__ == "__main__":
    main()
