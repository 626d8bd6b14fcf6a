"""A GAN: two networks, each with a trainer and an optimizer of its own, in one training step."""

import warnings

import torch
from torch import nn
from torch.nn import functional

from pyparallel import GossipDataParallel
from tests.gossip.loops import flat

NOISE, DATA, LR = 3, 4, 0.1


def build(*norm):
    """Return a generator, with layers after its first one, and a discriminator."""
    torch.manual_seed(7)
    generator = nn.Sequential(nn.Linear(NOISE, 16), *norm, nn.Tanh(), nn.Linear(16, DATA))
    hidden = nn.utils.parametrizations.spectral_norm(nn.Linear(DATA, 16))
    return generator, nn.Sequential(hidden, nn.Tanh(), nn.Linear(16, 1))


class Gan:
    """What a user's loop has; without algorithms the plain modules on this rank alone."""

    def __init__(self, algorithms=None, momentum=0.9, scalers=(None, None), norm=()):
        modules = build(*norm)
        self.optimizers = [
            torch.optim.SGD(each.parameters(), lr=lr, momentum=momentum)
            for each, lr in zip(modules, (LR, 2 * LR), strict=True)
        ]
        if algorithms is not None:
            modules = map(GossipDataParallel, modules, self.optimizers, algorithms)
        self.generator, self.discriminator = self.models = list(modules)
        self.scalers = scalers
        self.spoiled = ()  # the index of networks whose gradient gets an inf
        self.before_step = lambda index: None

    def step(self, index, *losses):
        """Step a network with the gradients of losses, which are functions; return their sum."""
        scaler, optimizer, total = self.scalers[index], self.optimizers[index], 0.0
        optimizer.zero_grad()
        first, handle = next(self.models[index].parameters()), None
        if index in self.spoiled:
            handle = first.register_hook(lambda gradient: gradient / 0)
        for each in losses:
            loss = each()
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.item()
        if handle:
            handle.remove()
        self.before_step(index)
        (optimizer if scaler is None else scaler).step(*[optimizer] * (scaler is not None))
        return total


def data_of(num_steps, rank=0, num_ranks=1, seed=3, size=8):
    """Return a rank's part of the joined batches: real samples, and noise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        real = torch.randn(size, DATA, generator=generator) + 1
        noise = torch.randn(3, size, NOISE, generator=generator)
        yield real[rank::num_ranks], noise[:, rank::num_ranks]


def is_real(logits):
    return functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def is_fake(logits):
    return functional.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


# ------------------------------------------------------------- a training step, as users write it


def one_fake(gan, real, noise):
    """The generator runs once for both; its step leaves gradients in the discriminator."""
    fake = gan.generator(noise[0])
    critic = gan.step(1, lambda: critic_loss(gan.discriminator, real, fake))
    return critic, gan.step(0, lambda: is_real(gan.discriminator(fake)))


def critic_loss(discriminator, real, fake):
    return is_real(discriminator(real)) + is_fake(discriminator(fake.detach()))


def two_backwards(gan, real, noise):
    """The discriminator's losses are back-propagated apart, without a graph of the generator."""
    with torch.no_grad():
        fake = gan.generator(noise[0])
    losses = lambda: is_real(gan.discriminator(real)), lambda: is_fake(gan.discriminator(fake))
    critic = gan.step(1, *losses)
    return critic, gan.step(0, lambda: is_real(gan.discriminator(gan.generator(noise[1]))))


def around_the_trainer(gan, real, noise):
    """The generator's step goes through the discriminator's bare module, which sends nothing."""
    fake = gan.generator(noise[0])
    critic = gan.step(1, lambda: critic_loss(gan.discriminator, real, fake))
    bare = getattr(gan.discriminator, "module", gan.discriminator)
    return critic, gan.step(0, lambda: is_real(bare(fake)))


def frozen(gan, real, noise):
    """The discriminator takes no gradients in the generator's step, which comes first."""
    gan.discriminator.requires_grad_(False)
    loss = gan.step(0, lambda: is_real(gan.discriminator(gan.generator(noise[0]))))
    gan.discriminator.requires_grad_(True)
    fake = gan.generator(noise[1]).detach()
    both = gan.discriminator(torch.cat([real, fake])).split(len(real))
    return gan.step(1, lambda: is_real(both[0]) + is_fake(both[1])), loss


def penalized(gan, real, noise):
    """WGAN-GP: two steps of the critic for one of the generator, with a double backward."""

    def loss():
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(gan.discriminator(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return gan.discriminator(fake).mean() - gan.discriminator(real).mean() + penalty

    for each in noise[:2]:
        fake = gan.generator(each).detach()
        critic = gan.step(1, loss)
    return critic, gan.step(0, lambda: -gan.discriminator(gan.generator(noise[2])).mean())


def clipped(gan, real, noise):
    """WGAN: the critic's weights are clipped after its step."""
    fake = gan.generator(noise[0])

    def loss():
        return gan.discriminator(fake.detach()).mean() - gan.discriminator(real).mean()

    critic = gan.step(1, loss)
    with torch.no_grad():
        for parameter in gan.discriminator.parameters():
            parameter.clamp_(-0.3, 0.3)
    return critic, gan.step(0, lambda: -gan.discriminator(fake).mean())


STEPS = {
    each.__name__: each
    for each in (one_fake, two_backwards, around_the_trainer, frozen, penalized, clipped)
}


def train(gan, step, data):
    """Return the losses, and fail on warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = []
        for real, noise in data:
            losses.append(step(gan, real, noise))
            for scaler in {id(each): each for each in gan.scalers if each}.values():
                scaler.update()
        return torch.tensor(losses, dtype=torch.float64)


def weights(gan):
    return [flat(model).clone() for model in gan.models]
