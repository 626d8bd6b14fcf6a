"""Two trainers in one training step: loss scales, checkpoints and mistakes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import OSGP, SGP, AllReduce, GossipState
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring
from tests.cases import slow
from tests.gossip.loops import flat
from tests.gossip.two_trainers.gan import (
    DATA,
    LR,
    Gan,
    around_the_trainer,
    data_of,
    is_fake,
    is_real,
    one_fake,
    train,
    two_backwards,
    weights,
)
from tests.workers import assert_equal_on_all_ranks, on_ranks

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


def train_scaled_in_all_ways(rank, overlap, spoiled_ranks):
    algorithms = [SGP(OnePeerExponential(4), overlap)] * 2
    return {
        (spoiled, shared): train_scaled(rank, algorithms, shared, spoiled)
        for spoiled in spoiled_ranks
        for shared in (None, True, False)
    }


@pytest.mark.parametrize(
    ("overlap", "spoiled_ranks"),
    [slow(0, [(1,), (0, 1, 2, 3)]), (1, [(1,)]), slow(1, [(0, 1, 2, 3)])],
)
def test_a_scaler_skips_the_network_with_the_inf_alone(ranks, subtests, overlap, spoiled_ranks):
    """Every rank takes the rounds of both; its own scaler decides what it skips."""
    results = ranks.run(4, train_scaled_in_all_ways, overlap, spoiled_ranks)
    for rank, found in enumerate(results):
        for (spoiled, shared), (own, scales) in found.items():
            with subtests.test(f"{spoiled}, {shared}, rank {rank}"):
                expected, _ = found[spoiled, None]
                assert all(map(torch.equal, own, expected))
                skipped = rank in spoiled
                # Doubled after steps 4 and 8; halved in step 6, and doubled 4 steps later.
                if shared is not None:
                    assert scales[1] == 2.0 ** (10 if skipped else 12)
                    assert scales[0] == 2.0 ** (10 if skipped and shared else 12)


def test_an_inf_on_one_rank_is_skipped_on_all_with_all_reduce(ranks):
    found = ranks.run(2, train_scaled, [AllReduce()] * 2, True, (1,))
    for own, scales in found:
        assert all(each.isfinite().all() for each in own)
        assert all(map(torch.equal, own, found[0][0]))
        assert scales == found[0][1]


# ----------------------------------------------------------------------------------- checkpoints


def resume(rank, folder):
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
    # What ranks have under one key is saved once.
    dcp.save({**states, f"scalers-{rank}": scalers}, checkpoint_id=folder)
    in_flight = [model._averager.status.in_flight for model in gan.models]
    expected = train_on(gan, data[5:])
    gan_again, states = make()
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


def test_both_resume_bit_for_bit_with_messages_in_flight(ranks, tmp_path):
    results = ranks.run(2, resume, tmp_path)
    for same, in_flight, *_ in results:
        assert all(same), same
        assert all(in_flight)
    assert results[0][3] != results[1][3]  # the scales of ranks differ


@on_ranks(2)
def test_the_state_of_the_other_network_is_refused_on_all_ranks(rank):
    """Load with the states of the two networks exchanged, on one rank and on both."""
    gan = Gan([SGP(Ring(2), overlap=1)] * 2)
    states = [GossipState(*pair) for pair in zip(gan.models, gan.optimizers, strict=True)]
    train(gan, one_fake, data_of(3, rank, 2))
    saved, before = [state.state_dict() for state in states], weights(gan)
    for exchanged_on in ([0], [0, 1]):
        with pytest.raises(ValueError, match="must be of the same") as error:
            states[0].load_state_dict(saved[rank in exchanged_on])
        assert all(map(torch.equal, weights(gan), before))
        assert_equal_on_all_ranks(str(error.value))
    states[0].load_state_dict(saved[0])


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
    before = flat(models[0]).clone()
    with pytest.raises(RuntimeError, match=r"has new storage .* wrapping it again without close"):
        models[0](torch.ones(2, DATA))
    with pytest.raises(RuntimeError, match=r"must be stepped by the SGD that it was given|storage"):
        optimizers[0].step()
    assert torch.equal(flat(models[0]), before)


def make_mistakes(rank):
    assert join_both(rank).isfinite().all()
    share_a_layer(rank)
    return [back_propagate_twice(rank, each) for each in (AllReduce(), SGP(Complete(2)))]


def test_mistakes_are_errors_on_all_ranks(ranks):
    (exact, (none, *_)), (other_exact, (other_none, *_)) = ranks.run(2, make_mistakes)
    assert none is other_none is None
    assert "got 2 since the last forward" in exact[0]
    assert exact[0] == other_exact[0]
    assert all(map(torch.equal, exact[1:], other_exact[1:]))
