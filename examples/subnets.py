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
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    steps, seconds, scores = 0, 0.0, []
    for _ in (bar := tqdm(range(options.epochs), name, disable=dist.get_rank() > 0)):
        begin = time.perf_counter()
        for batch in torch.randperm(len(labels)).split(16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()  # of the subnet; every --interval steps a merge follows
            steps += 1
            log_metrics(options.tensorboard, name, metrics(), steps)
        scheduler.step()
        seconds += time.perf_counter() - begin
        with full_model() as module:  # all ranks enter it together
            recalibrate(module, images.split(128))  # BatchNorm's running statistics
            scores.append((steps, 100 * accuracy(module, *test)))
            bar.set_postfix_str(f"test accuracy {scores[-1][1]:.1f} %")
            state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    return scores, f"{1000 * seconds / steps:.1f}", state


def main():
    options = make_parser(__doc__, epochs=12, interval=20).parse_args()
    device = join_ranks(options.seed)
    images, labels, *test = (tensor.to(device) for tensor in load_digits())
    data = options, *share(images, labels), test
    ddp = DistributedDataParallel(wide_digits_net().to(device))
    size, before = count(ddp), (0, 100 * accuracy(ddp.module, *test))
    sgd, whole = make_optimizer(ddp.parameters()), lambda: nullcontext(ddp.module)
    exact, exact_ms, _ = train("all-reduce", ddp, sgd, whole, dict, *data)
    torch.manual_seed(options.seed)
    model, partition = wide_digits_net().to(device), Partition(seed=options.seed)
    trainer = SubnetTrainer(model, make_optimizer, partition, options.interval)
    ours = trainer.optimizer, trainer.full_model, trainer.metrics
    scores, ms, state = train("subnets", trainer, *ours, *data)
    steps, score = scores[-1]
    sent = 8 * size * (1 - 1 / dist.get_world_size()), trainer.bytes_sent / steps
    kilobytes = [f"{each / 1000:,.0f}" for each in sent]
    if dist.get_rank() == 0:
        rows = "", "test accuracy", "weights in training", "ms per step", "kB a rank sends per step"
        first = "untrained", f"{before[1]:.1f} %"
        ddp_column = "all-reduce", f"{exact[-1][1]:.1f} %", f"{size:,}", exact_ms, kilobytes[0]
        column = "subnets", f"{score:.1f} %", f"{count(trainer.subnet):,}", ms, kilobytes[1]
        title = f"Subnets of {dist.get_world_size()} ranks, merged every {options.interval} steps"
        print_table(title, rows, first, ddp_column, column)
        curves = {"all-reduce": [before, *exact], "subnets": [before, *scores]}
        labels = "Do subnets learn as much?", curves, "step", "test accuracy, %"
        folder = options.out / f"every-{options.interval}-steps"
        picture = draw(folder, *labels, ylim=(0, 102))
        note = "A rank trains and sends its own units only; merged, they are the whole model."
        load = save_model(state, folder, "wide_digits_net()")
        print_next(
            note, picture, load, f'make train-subnets ARGS="--interval {5 * options.interval}"'
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
