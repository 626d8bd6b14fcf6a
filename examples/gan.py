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
from digits_gan import (
    NOISE,
    discriminator_net,
    draw_gan,
    frechet_distance,
    generate,
    generator_net,
)
from pyparallel import GossipDataParallel, gossip, topology
from ranks import following, gather, join_ranks, make_parser
from show import print_next, print_table, save_model

ALGORITHMS = {
    "sgp": gossip.SGP,
    "osgp": gossip.OSGP,  # sends during the next batch
    "localsgd": lambda graph: gossip.LocalSGD(interval=8),  # of all ranks: no topology
}


def train(name, algorithm, options, images, noise, test):
    torch.manual_seed(options.seed)
    nets = [net().to(images.device) for net in (generator_net, discriminator_net)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99)) for net in nets]
    pairs = zip(nets, optimizers, strict=True)
    generator, discriminator = (GossipDataParallel(*pair, algorithm) for pair in pairs)
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # ranks draw other noise
    scores, seconds = [], 0.0
    for step in (bar := tqdm(range(1, options.steps + 1), name, disable=dist.get_rank() > 0)):
        begin = time.perf_counter()
        real = images[torch.randint(len(images), (16,))]
        fake = generator(torch.randn(16, NOISE, device=images.device))
        optimizers[1].zero_grad()
        logits, fake_logits = discriminator(torch.cat([real, fake.detach()])).chunk(2)
        (softplus(-logits) + softplus(fake_logits)).mean().backward()
        optimizers[1].step()  # the local step, then a round of averaging
        optimizers[0].zero_grad()
        discriminator.requires_grad_(False)  # all-reduce would average its gradients here too
        softplus(-discriminator(fake)).mean().backward()
        discriminator.requires_grad_(True)
        optimizers[0].step()
        seconds += time.perf_counter() - begin
        if step % max(1, options.steps // 25) == 0:
            with generator.consensus() as averaged:  # the mean of all ranks, restored afterwards
                digits = generate(averaged, noise)
            scores.append((step, frechet_distance(digits, test)))
            bar.set_postfix(distance=f"{scores[-1][1]:.2f}")
    sent = generator.bytes_sent + discriminator.bytes_sent
    distance = generator.consensus_distance()
    with generator.consensus() as averaged:
        digits = generate(averaged, noise)
        state = {key: tensor.clone() for key, tensor in averaged.state_dict().items()}
    costs = 1000 * seconds / options.steps, sent / 1000 / options.steps, distance
    row = [name, f"{frechet_distance(digits, test):.2f}", *map("{:.3g}".format, costs)]
    return row, scores, digits, state


def main():
    parser = make_parser(__doc__, steps=1500)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="sgp")
    options = parser.parse_args()
    device = join_ranks(options.seed)
    images, _, test, _ = (tensor.to(device) for tensor in load_digits())
    noise = torch.randn(len(test), NOISE, device=device)
    data = options, *share(images), noise, test
    graph = topology.OnePeerExponential(dist.get_world_size())
    before = frechet_distance(generate(generator_net().to(device), noise), test)
    exact, exact_scores, exact_digits, _ = train("all-reduce", gossip.AllReduce(), *data)
    ours, scores, digits, state = train(options.algorithm, ALGORITHMS[options.algorithm](graph), *data)
    if dist.get_rank() == 0:
        best = frechet_distance(images, test)
        rows = "", "distance to held-out digits", "ms per step", "kB a rank sends per step", "ranks differ by"
        print_table(f"GAN, {options.algorithm}, {dist.get_world_size()} ranks", rows, ("untrained", f"{before:.2f}"), exact, ours)
        curves = {"all-reduce": exact_scores, options.algorithm: scores}
        pictures = {"held out": test, "all-reduce": exact_digits, options.algorithm: digits}
        picture = draw_gan(options.out / options.algorithm, f"Does {options.algorithm} learn as fast?", curves, best, pictures)
        note = f"The distance is Frechet's, of pixels: {best:.2f} for training digits."
        load = save_model(state, options.out / options.algorithm, "generator_net()", "digits_gan")
        other = following(options.algorithm, ALGORITHMS)
        print_next(note, picture, load, f'make train-gan ARGS="--algorithm {other}"')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
