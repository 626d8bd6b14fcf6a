"""Train subnets: every rank trains its own units of each hidden layer, and no others.

    torchrun --standalone --nproc-per-node 4 examples/subnets.py
    torchrun --standalone --nproc-per-node 4 examples/subnets.py --interval 100

Every --interval steps the subnets are merged into the whole model and units are assigned again.
Each rank learns scikit-learn's digits from its own part of the images: first the whole model by
all-reduce, for comparison, then a subnet. What is tested and saved is the whole model.
"""

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from data import load_digits, share
from models import accuracy, count, wide_digits_net
from pyparallel.subnets import Partition, SubnetTrainer, recalibrate
from ranks import join_ranks, log_metrics, make_parser
from show import draw, print_next, print_table, save_model


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(name, model, optimizer, full_model, metrics, options, images, labels, test):
    """Return the accuracy of the whole model by step, ms per step, and the whole weights.

    ``full_model()`` is a context with the whole model, ``metrics()`` what TensorBoard shows.
    """
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    num_steps = 0
    seconds = 0.0
    scores = []
    bar = tqdm(range(options.epochs), name, disable=dist.get_rank() > 0)
    for _ in bar:
        begin = time.perf_counter()
        for batch in torch.randperm(len(labels)).split(16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()  # of the subnet; every --interval steps a merge follows
            num_steps += 1
            log_metrics(options.tensorboard, name, metrics(), num_steps)
        scheduler.step()
        seconds += time.perf_counter() - begin

        with full_model() as module:  # all ranks enter it together
            recalibrate(module, images.split(128))  # BatchNorm's running statistics
            score = 100 * accuracy(module, *test)
            state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        scores.append((num_steps, score))
        bar.set_postfix_str(f"test accuracy {score:.1f} %")
    return scores, f"{1000 * seconds / num_steps:.1f}", state


def main():
    options = make_parser(__doc__, epochs=12, interval=20).parse_args()
    device = join_ranks(options.seed)
    images, labels, *test = (tensor.to(device) for tensor in load_digits())
    data = options, *share(images, labels), test

    ddp = DistributedDataParallel(wide_digits_net().to(device))
    num_weights = count(ddp)
    untrained = 100 * accuracy(ddp.module, *test)
    exact_scores, exact_ms, _ = train(
        "all-reduce",
        ddp,
        make_optimizer(ddp.parameters()),
        lambda: nullcontext(ddp.module),
        dict,  # no metrics
        *data,
    )

    torch.manual_seed(options.seed)
    model = wide_digits_net().to(device)
    partition = Partition(seed=options.seed)
    trainer = SubnetTrainer(model, make_optimizer, partition, options.interval)
    scores, ms, state = train(
        "subnets",
        trainer,
        trainer.optimizer,
        trainer.full_model,
        trainer.metrics,
        *data,
    )

    num_steps, score = scores[-1]
    _, exact_score = exact_scores[-1]
    exact_bytes = 8 * num_weights * (1 - 1 / dist.get_world_size())
    exact = [
        "all-reduce",
        f"{exact_score:.1f} %",
        f"{num_weights:,}",
        exact_ms,
        f"{exact_bytes / 1000:,.0f}",
    ]
    ours = [
        "subnets",
        f"{score:.1f} %",
        f"{count(trainer.subnet):,}",
        ms,
        f"{trainer.bytes_sent / num_steps / 1000:,.0f}",
    ]
    if dist.get_rank() == 0:
        report(options, untrained, exact, exact_scores, ours, scores, state)
    dist.destroy_process_group()


def report(options, untrained, exact, exact_scores, ours, scores, state):
    """Print the table, draw the accuracy and save the whole model."""
    headings = [
        "",
        "test accuracy",
        "weights in training",
        "ms per step",
        "kB a rank sends per step",
    ]
    title = f"Subnets of {dist.get_world_size()} ranks, merged every {options.interval} steps"
    print_table(title, headings, ("untrained", f"{untrained:.1f} %"), exact, ours)

    path = options.out / f"every-{options.interval}-steps"
    start = (0, untrained)
    picture = draw(
        path,
        "Do subnets learn as much?",
        {"all-reduce": [start, *exact_scores], "subnets": [start, *scores]},
        "step",
        "test accuracy, %",
        ylim=(0, 102),
    )
    load = save_model(state, path, "wide_digits_net()")
    print_next(
        "A rank trains and sends its own units only; merged, they are the whole model.",
        picture,
        load,
        f'make train-subnets ARGS="--interval {5 * options.interval}"',
    )


if __name__ == "__main__":
    main()
