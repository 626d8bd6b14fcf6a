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
from pyparallel import GossipDataParallel, gossip
from ranks import following, join_ranks, log_metrics, make_parser
from show import print_next, print_table, save_model

ALGORITHMS = {
    "sgp": gossip.SGP(),
    "osgp": gossip.OSGP(),  # sends during the next batch
    "localsgd": gossip.LocalSGD(interval=8),
}


def train(name, algorithm, options, images, noise, test):
    """Return a column of the table, the distances by step, generated digits and the weights."""
    torch.manual_seed(options.seed)
    generator = generator_net().to(images.device)
    critic = critic_net().to(images.device)
    generator_optimizer = make_optimizer(generator)
    critic_optimizer = make_optimizer(critic)
    generator = GossipDataParallel(generator, generator_optimizer, algorithm)
    critic = GossipDataParallel(critic, critic_optimizer, algorithm)
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # ranks draw other noise

    scores = []
    seconds = 0.0
    bar = tqdm(range(1, options.steps + 1), name, disable=dist.get_rank() > 0)
    for step in bar:
        begin = time.perf_counter()
        real = images[torch.randint(len(images), (16,))]
        fake = generator(torch.randn(16, NOISE, device=images.device))

        critic_optimizer.zero_grad()
        logits, fake_logits = critic(torch.cat([real, fake.detach()])).chunk(2)
        (softplus(-logits) + softplus(fake_logits)).mean().backward()
        critic_optimizer.step()  # the critic's local step, then its round of averaging

        generator_optimizer.zero_grad()
        critic.requires_grad_(False)  # saves the all-reduce of gradients that nobody steps with
        softplus(-critic(fake)).mean().backward()
        critic.requires_grad_(True)
        generator_optimizer.step()  # likewise the generator
        seconds += time.perf_counter() - begin

        log_metrics(options.tensorboard, name, generator.metrics(), step)
        if step % 50 == 0 or step == options.steps:
            with generator.consensus() as averaged:  # the mean of all ranks, restored afterwards
                digits = generate(averaged, noise)
                state = {key: value.clone() for key, value in averaged.state_dict().items()}
            distance = frechet_distance(digits, test)
            scores.append((step, distance))
            bar.set_postfix(distance=f"{distance:.2f}")

    bytes_sent = generator.bytes_sent + critic.bytes_sent
    column = [
        name,
        f"{distance:.2f}",
        f"{1000 * seconds / options.steps:.1f}",
        f"{bytes_sent / options.steps / 1000:.0f}",
        f"{generator.consensus_distance():.1g}",
    ]
    return column, scores, digits, state


def make_optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99))


def main():
    parser = make_parser(__doc__, steps=1000)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="sgp")
    options = parser.parse_args()
    device = join_ranks(options.seed)

    images, _, test, _ = (tensor.to(device) for tensor in load_digits())
    noise = torch.randn(len(test), NOISE, device=device)
    [own_images] = share(images)
    algorithm = ALGORITHMS[options.algorithm]

    untrained = frechet_distance(generate(generator_net().to(device), noise), test)
    exact, *exact_run, _ = train("all-reduce", gossip.AllReduce(), options, own_images, noise, test)
    ours, *run, state = train(options.algorithm, algorithm, options, own_images, noise, test)
    if dist.get_rank() == 0:
        best = frechet_distance(images, test)
        report(options, f"{untrained:.2f}", best, test, exact, exact_run, ours, run, state)
    dist.destroy_process_group()


def report(options, untrained, best, test, exact, exact_run, ours, run, state):
    """Print the table, draw distances and digits, and save the generator."""
    name = options.algorithm
    headings = [
        "",
        "distance to held-out digits",
        "ms per step",
        "kB a rank sends per step",
        "ranks differ by",
    ]
    title = f"GAN by {name}, {dist.get_world_size()} ranks"
    print_table(title, headings, ("untrained", untrained), exact, ours)

    picture = draw_gan(
        options.out / name,
        f"Does {name} learn as fast?",
        {"all-reduce": exact_run, name: run},
        best,
        test,
    )
    load = save_model(state, options.out / name, "generator_net()", "digits_gan")
    print_next(
        f"The distance is Frechet's, of pixels; that of training digits is {best:.2f}.",
        picture,
        load,
        f'make train-gan ARGS="--algorithm {following(name, ALGORITHMS)}"',
    )


if __name__ == "__main__":
    main()
