"""Two networks, each with a trainer and an optimizer of its own, in one training step: a GAN."""

import random
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional

from pyparallel import GossipDataParallel
from pyparallel.gossip import DPSGD, OSGP, SGP, AllReduce, GossipState
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring
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


STEPS = {
    each.__name__: each for each in (one_fake, two_backwards, around_the_trainer, frozen, penalized)
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


# ------------------------------------------------------------------- replicas equal one network

EXACT = {
    "all-reduce": [AllReduce, AllReduce],
    "dpsgd": [lambda: DPSGD(Complete(dist.get_world_size()))] * 2,
    "both": [AllReduce, lambda: SGP(Complete(dist.get_world_size()))],
}


def train_replicas(rank, num_steps):
    found = {}
    for name, makers in EXACT.items():
        for name_of_step, step in STEPS.items():
            gan = Gan([make() for make in makers])
            losses = train(gan, step, data_of(num_steps, rank, dist.get_world_size()))
            num_bytes = [model.bytes_sent for model in gan.models]
            found[name, name_of_step] = losses, weights(gan), num_bytes
    return found


def test_replicas_equal_one_gan_on_the_joined_batch(ranks, subtests):
    """SGD is linear in the gradients, so the mean of updated weights is a step on their mean."""
    alone = {}
    for name, step in STEPS.items():
        gan = Gan()
        alone[name] = train(gan, step, data_of(12)), weights(gan)
        assert (weights(gan)[0] - flat(build()[0])).abs().max() > 0.1
    for num_ranks in (1, 2, 4):
        results = ranks.run(num_ranks, train_replicas, 12)
        for name, step in results[0]:
            with subtests.test(f"{name}, {step}, {num_ranks} ranks"):
                found = [result[name, step] for result in results]
                expected, final = alone[step]
                mean = torch.stack([losses for losses, *_ in found]).mean(0)
                torch.testing.assert_close(mean, expected, rtol=0, atol=1e-5)
                for _, those, num_bytes in found:
                    torch.testing.assert_close(those, final, rtol=0, atol=1e-5)
                    assert num_ranks == 1 or min(num_bytes) > 0
                if num_ranks == 1:
                    assert torch.equal(mean, expected)
                    assert all(map(torch.equal, found[0][1], final))


# -------------------------------------------------------------------------- against the papers


class Matrices:
    """A network of all ranks by the paper's rule, with numerators x and weights w as matrices.

    Args:
        module: in float64, at the start; evaluated with the weights of one rank after another.
    """

    def __init__(self, module, algorithm, lr):
        self.module, self.topology, self.lr = module.double(), algorithm.topology, lr
        self.merges_first = isinstance(algorithm, SGP)  # else Algorithm 2 of Assran et al.
        num_ranks = self.topology.num_ranks
        self.x = flat(module).repeat(num_ranks, 1)
        self.w = torch.ones(num_ranks, 1, dtype=torch.float64)
        self.buffers = [[b.clone() for b in module.buffers()] for _ in range(num_ranks)]
        self.sent, self.index = (0, 0), 0

    def at(self, rank):
        """Return the module as it is on a rank, which forwards may change the buffers of."""
        values = self.x[rank] / self.w[rank]
        nn.utils.vector_to_parameters(values.clone(), self.module.parameters())
        for buffer, own in zip(self.module.buffers(), self.buffers[rank], strict=True):
            buffer.data = own
        return self.module

    def step(self, gradients):
        matrix = torch.as_tensor(self.topology.mixing_matrix(self.index), dtype=torch.float64)
        kept = torch.diag(matrix.diag())
        if self.merges_first:
            self.x, self.w = self.x + self.sent[0], self.w + self.sent[1]
        self.x = self.x - self.lr * gradients
        sent = (matrix - kept) @ self.x, (matrix - kept) @ self.w
        self.x, self.w = kept @ self.x, kept @ self.w
        if not self.merges_first:
            self.x, self.w = self.x + self.sent[0], self.w + self.sent[1]
        self.sent, self.index = sent, self.index + 1


def gradient(loss, module):
    found = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([each.flatten() for each in found])


def one_fake_by_hand(generators, discriminators, data):
    """Take the steps of `one_fake`; return the weights z of all ranks, and w."""
    num_ranks = len(data)
    for batches in zip(*data, strict=True):
        reals, noises = ([each[i].double() for each in batches] for i in (0, 1))
        rows = []
        for rank in range(num_ranks):
            critic = discriminators.at(rank)
            fake = generators.at(rank)(noises[rank][0]).detach()
            rows.append(gradient(critic_loss(critic, reals[rank], fake), critic))
        discriminators.step(torch.stack(rows))
        rows = []
        for rank in range(num_ranks):
            critic, generator = discriminators.at(rank), generators.at(rank)
            loss = is_real(critic(generator(noises[rank][0])))
            rows.append(gradient(loss, generator))
        generators.step(torch.stack(rows))
    return [(each.x / each.w, each.w) for each in (generators, discriminators)]


def overlapped(num_ranks):
    graph = OnePeerExponential(num_ranks)
    return {
        "sgp": [SGP(graph, 1)] * 2,
        "osgp": [OSGP(graph)] * 2,
        "one each": [SGP(graph, 1), OSGP(graph)],
    }


def train_overlapped(rank, num_steps):
    num_ranks, found = dist.get_world_size(), {}
    for name, algorithms in overlapped(num_ranks).items():
        gan = Gan(algorithms, momentum=0)
        train(gan, one_fake, data_of(num_steps, rank, num_ranks))
        found[name] = weights(gan), [float(model.push_sum_weight) for model in gan.models]
    return found


def test_overlapped_messages_of_both_follow_the_papers(ranks, subtests):
    for num_ranks in (2, 4):
        results = ranks.run(num_ranks, train_overlapped, 12)
        for name, algorithms in overlapped(num_ranks).items():
            with subtests.test(f"{name}, {num_ranks} ranks"):
                lrs = LR, 2 * LR
                networks = map(Matrices, build(), algorithms, lrs)
                data = [data_of(12, rank, num_ranks) for rank in range(num_ranks)]
                expected = one_fake_by_hand(*networks, data)
                for network, (z, w) in enumerate(expected):
                    assert (z - z.mean(0)).abs().max() > 1e-3  # ranks differ
                    for rank, result in enumerate(results):
                        own, weight = (each[network] for each in result[name])
                        torch.testing.assert_close(own.double(), z[rank], rtol=0, atol=2e-6)
                        assert weight == float(w[rank])


# ------------------------------------------------------------------------- ranks of other speeds

MIXED = {
    "other overlaps": [lambda: SGP(Ring(4)), lambda: SGP(OnePeerExponential(4), overlap=1)],
    "other algorithms": [AllReduce, lambda: OSGP(OnePeerExponential(4), delay=2)],
}


def pause(pauses, longest, index):
    time.sleep(pauses.random() * longest)


def train_with_pauses(rank, name, step):
    results = []
    for longest in (0.0, 0.02):
        gan, pauses = Gan([make() for make in MIXED[name]]), random.Random(rank)
        gan.before_step = partial(pause, pauses, longest)
        losses = train(gan, STEPS[step], data_of(10, rank, 4))
        results.append([losses, *weights(gan)])
    return results


@pytest.mark.parametrize("name", MIXED)
def test_messages_of_two_trainers_do_not_mix_when_ranks_pause(ranks, name):
    for step in ("one_fake", "penalized"):
        for even, paused in ranks.run(4, train_with_pauses, name, step):
            assert all(map(torch.equal, even, paused)), step


# ---------------------------------------------------------------------------------- loss scales


def scaled(shared):
    """Return scalers of the generator and the discriminator, one or two."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) for _ in "gd"]
    return (scalers[0],) * 2 if shared else tuple(scalers)


def train_scaled(rank, algorithms, shared, spoiled):
    """Train; return weights and scales. In step 5 the discriminator has an inf on some ranks.

    Without a scaler those ranks have no gradients in that step.
    """
    gan = Gan(algorithms, scalers=(None, None) if shared is None else scaled(shared))

    def drop(index):
        for parameter in gan.models[index].parameters():
            parameter.grad = None if index == 1 else parameter.grad

    for number, batch in enumerate(data_of(9, rank, dist.get_world_size())):
        is_spoiled = number == 5 and rank in spoiled
        gan.spoiled = (1,) if is_spoiled and shared is not None else ()
        gan.before_step = drop if is_spoiled and shared is None else lambda index: None
        train(gan, two_backwards, [batch])
    return weights(gan), [each.get_scale() for each in gan.scalers if each]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_scaler_skips_the_network_with_the_inf_alone(ranks, subtests, overlap):
    """Every rank takes the rounds of both; its own scaler decides what it skips."""
    algorithms = [SGP(OnePeerExponential(4), overlap)] * 2
    for spoiled in ((), (1,), range(4)):
        expected = ranks.run(4, train_scaled, algorithms, None, spoiled)
        for shared in (True, False):
            with subtests.test(f"{spoiled}, {shared}"):
                found = ranks.run(4, train_scaled, algorithms, shared, spoiled)
                for rank, (own, scales) in enumerate(found):
                    assert all(map(torch.equal, own, expected[rank][0]))
                    skipped = rank in spoiled
                    # Doubled after steps 4 and 8; halved in step 6, and doubled 4 steps later.
                    assert scales[1] == 2.0 ** (10 if skipped else 12)
                    assert scales[0] == 2.0 ** (10 if skipped and shared else 12)


def test_an_inf_on_one_rank_is_skipped_on_all_with_all_reduce(ranks):
    found = ranks.run(2, train_scaled, [AllReduce()] * 2, True, (1,))
    for own, scales in found:
        assert all(each.isfinite().all() for each in own)
        assert all(map(torch.equal, own, found[0][0]))
        assert scales == found[0][1]


# ----------------------------------------------------------------------------------- checkpoints


def resume(rank, folder, as_files):
    """Return whether new trainers go on as those that were saved, with messages in flight."""
    graph = OnePeerExponential(2)

    def make():
        norm = [nn.BatchNorm1d(16)]
        algorithms = [SGP(graph, overlap=1), OSGP(graph)]
        gan = Gan(algorithms, scalers=scaled(shared=False), norm=norm)
        pairs = zip(gan.models, gan.optimizers, strict=True)
        generator, discriminator = [GossipState(*pair) for pair in pairs]
        return gan, {"generator": generator, "discriminator": discriminator}

    def train_on(gan, data):
        gan.spoiled = (rank,)  # another network on each rank, from now on
        train(gan, one_fake, data[:1])
        gan.spoiled = ()
        return train(gan, one_fake, data[1:])

    data = list(data_of(10, rank, 2))
    gan, states = make()
    train_on(gan, data[:5])
    scalers = [each.state_dict() for each in gan.scalers]
    if as_files:
        values = {name: state.state_dict() for name, state in states.items()}
        torch.save({**values, "scalers": scalers}, folder / f"{rank}.pt")
    else:  # what ranks have under one key is saved once
        dcp.save({**states, f"scalers-{rank}": scalers}, checkpoint_id=folder)
    in_flight = [model._averager.in_flight for model in gan.models]
    expected = train_on(gan, data[5:])
    gan_again, states = make()
    if as_files:
        loaded = torch.load(folder / f"{rank}.pt")
        for name, state in states.items():
            state.load_state_dict(loaded[name])
        scalers = loaded["scalers"]
    else:
        loaded = {**states, f"scalers-{rank}": [each.state_dict() for each in gan_again.scalers]}
        dcp.load(loaded, checkpoint_id=folder)
        scalers = loaded[f"scalers-{rank}"]
    for scaler, saved in zip(gan_again.scalers, scalers, strict=True):
        scaler.load_state_dict(saved)
    losses = train_on(gan_again, data[5:])
    same = [torch.equal(losses, expected), *map(torch.equal, weights(gan), weights(gan_again))]
    buffers = [list(each.generator.buffers()) for each in (gan, gan_again)]
    same += map(torch.equal, *buffers)
    for each in (gan, gan_again):
        for model in each.models:
            model.flush()
            with model.consensus() as averaged:
                same.append(all(p.isfinite().all() for p in averaged.parameters()))
    return same, in_flight, [each.get_scale() for each in gan.scalers], scalers


@pytest.mark.parametrize("as_files", [True, False])
def test_both_resume_bit_for_bit_with_messages_in_flight(ranks, as_files, tmp_path):
    results = ranks.run(2, resume, tmp_path, as_files)
    for same, in_flight, *_ in results:
        assert all(same), same
        assert all(in_flight)
    assert results[0][3] != results[1][3]  # the scales of ranks differ


def load_wrongly(rank, exchanged_on):
    """Load with the states of the two networks exchanged on some ranks."""
    gan = Gan([SGP(Ring(2), overlap=1)] * 2)
    states = [GossipState(*pair) for pair in zip(gan.models, gan.optimizers, strict=True)]
    train(gan, one_fake, data_of(3, rank, 2))
    saved = [state.state_dict() for state in states]
    before = weights(gan)
    with pytest.raises(ValueError, match="must be of the same") as error:
        states[0].load_state_dict(saved[1 if rank in exchanged_on else 0])
    assert all(map(torch.equal, weights(gan), before))
    states[0].load_state_dict(saved[0])
    return str(error.value)


@pytest.mark.parametrize("exchanged_on", [[0], [0, 1]])
def test_the_state_of_the_other_network_is_refused_on_all_ranks(ranks, exchanged_on):
    first, second = ranks.run(2, load_wrongly, exchanged_on)
    assert first == second


# ------------------------------------------------------------------------------------ mistakes


def join_both(rank):
    gan = Gan([SGP(Ring(2)), AllReduce()])
    rule = "one trainer at a time, got one inside that of another"
    with gan.generator.join(), pytest.raises(RuntimeError, match=rule), gan.discriminator.join():
        pass
    with gan.generator.join(), gan.discriminator.join(enable=False):
        pass
    return train(gan, one_fake, data_of(2, rank, 2))


def back_propagate_twice(rank, algorithm):
    """Return the error, if any, of two forwards before two backwards; then train on."""
    gan = Gan([algorithm] * 2)
    ((real, _),) = data_of(1, rank, 2)
    losses, error = (is_real(gan.discriminator(real)), is_fake(gan.discriminator(real - 1))), None
    before = flat(gan.discriminator).clone()
    try:
        gan.step(1, lambda: losses[0], lambda: losses[1])
    except RuntimeError as raised:
        error = str(raised)
        assert torch.equal(flat(gan.discriminator), before)
    train(gan, one_fake, data_of(2, rank, 2))
    train(gan, around_the_trainer, data_of(2, rank, 2))
    return error, *weights(gan)


def share_a_layer(rank):
    layer, optimizers, models = nn.Linear(DATA, DATA), [], []
    for _ in range(2):
        module = nn.Sequential(layer, nn.Linear(DATA, 1))
        optimizers.append(torch.optim.SGD(module.parameters(), lr=LR))
        models.append(GossipDataParallel(module, optimizers[-1], SGP(Ring(2))))
    models[0](torch.ones(2, DATA)).sum().backward()
    before = flat(models[0]).clone()
    with pytest.raises(RuntimeError, match="must be stepped by the SGD that it was given"):
        optimizers[0].step()
    assert torch.equal(flat(models[0]), before)


def test_mistakes_are_errors_on_all_ranks(ranks):
    joined = ranks.run(2, join_both)
    assert all(each.isfinite().all() for each in joined)
    ranks.run(2, share_a_layer)
    for algorithm in (AllReduce(), SGP(Complete(2))):
        first, second = ranks.run(2, back_propagate_twice, algorithm)
        assert first[0] == second[0]
        if algorithm == AllReduce():
            assert "got 2 since the last forward" in first[0]
            assert all(map(torch.equal, first[1:], second[1:]))
        else:
            assert first[0] is None
