"""Train a GAN by gossip: generator and discriminator have a trainer and an optimizer each.

    torchrun --standalone --nproc-per-node 4 examples/gan.py
    torchrun --standalone --nproc-per-node 4 examples/gan.py --algorithm osgp

Each rank has its own part of scikit-learn's digits: first by all-reduce, for comparison, then by
gossip. What is scored and saved is the mean of the ranks' generators.
"""

import time

import torch
import torch.distributed as dist
from torch.nn.functional import softplus
from tqdm import tqdm

from data import load_digits, share
from digits_gan import NOISE, critic_net, draw_gan, frechet_distance, generate, generator_net
from pyparallel import GossipDataParallel, gossip, topology
from ranks import following, join_ranks, log_metrics, make_parser
from show import print_next, print_table, save_model

ALGORITHMS = {
    "sgp": gossip.SGP,
    "osgp": gossip.OSGP,  # sends during the next batch
    "localsgd": lambda graph: gossip.LocalSGD(interval=8),  # of all ranks: no topology
}


def train(name, algorithm, options, images, noise, test):
    torch.manual_seed(options.seed)
    nets = [net().to(images.device) for net in (generator_net, critic_net)]
    both = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99)) for net in nets]
    generator, critic = map(GossipDataParallel, nets, both, [algorithm] * 2)
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # ranks draw other noise
    scores, seconds = [], 0.0
    for step in (bar := tqdm(range(1, options.steps + 1), name, disable=dist.get_rank() > 0)):
        begin = time.perf_counter()
        real = images[torch.randint(len(images), (16,))]
        fake = generator(torch.randn(16, NOISE, device=images.device))
        both[1].zero_grad()
        logits, fake_logits = critic(torch.cat([real, fake.detach()])).chunk(2)
        (softplus(-logits) + softplus(fake_logits)).mean().backward()
        both[1].step()  # the critic's local step, then its round of averaging
        both[0].zero_grad()
        critic.requires_grad_(False)  # saves the all-reduce of gradients that nobody steps with
        softplus(-critic(fake)).mean().backward()
        critic.requires_grad_(True)
        both[0].step()  # likewise the generator
        seconds += time.perf_counter() - begin
        log_metrics(options.tensorboard, name, generator.metrics(), step)
        if step % 50 == 0 or step == options.steps:
            with generator.consensus() as averaged:  # the mean of all ranks, restored afterwards
                digits = generate(averaged, noise)
                state = {key: value.clone() for key, value in averaged.state_dict().items()}
            scores.append((step, frechet_distance(digits, test)))
            bar.set_postfix(distance=f"{scores[-1][1]:.2f}")
    ms, kilobytes = 1000 * seconds, (generator.bytes_sent + critic.bytes_sent) / 1000
    costs = f"{ms / options.steps:.1f}", f"{kilobytes / options.steps:.0f}"
    row = [name, f"{scores[-1][1]:.2f}", *costs, f"{generator.consensus_distance():.1g}"]
    return row, scores, digits, state


def main():
    parser = make_parser(__doc__, steps=1000)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="sgp")
    options = parser.parse_args()
    device, name = join_ranks(options.seed), options.algorithm
    images, _, test, _ = (tensor.to(device) for tensor in load_digits())
    noise = torch.randn(len(test), NOISE, device=device)
    data = options, *share(images), noise, test
    graph = topology.OnePeerExponential(dist.get_world_size())
    before = frechet_distance(generate(generator_net().to(device), noise), test)
    exact, *exact_results, _ = train("all-reduce", gossip.AllReduce(), *data)
    ours, *results, state = train(name, ALGORITHMS[name](graph), *data)
    if dist.get_rank() == 0:
        rows = "", "distance to held-out digits", "ms per step", "kB a rank sends per step"
        title = f"GAN by {name}, {dist.get_world_size()} ranks"
        print_table(title, (*rows, "ranks differ by"), ("untrained", f"{before:.2f}"), exact, ours)
        best, runs = frechet_distance(images, test), {"all-reduce": exact_results, name: results}
        picture = draw_gan(options.out / name, f"Does {name} learn as fast?", runs, best, test)
        note = f"The distance is Frechet's, of pixels; that of training digits is {best:.2f}."
        load = save_model(state, options.out / name, "generator_net()", "digits_gan")
        other = following(name, ALGORITHMS)
        print_next(note, picture, load, f'make train-gan ARGS="--algorithm {other}"')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
