"""Interrupted steps, replaced parameters, unusual optimizers: they work or raise an error."""

import copy
import inspect
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.comm import PeerError, StepCounts
from pyparallel.compression import Int8
from pyparallel.gossip import SGP, LeaderSGD, LocalSGD, NoLoCo
from pyparallel.gossip.topology import Complete, RandomMatching, Ring, Star
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import ALGORITHMS, step, wrap


def fail(*_):
    raise KeyError("a user's hook")


def interrupted_step(rank):
    model, optimizer = wrap(SGP(StarWithChords(3)), nn.Linear(4, 2))
    step(model, optimizer)
    assert model.push_sum_weight != 1
    before = model.module.weight.detach().clone()

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        optimizer.step()
    hook.remove()
    torch.testing.assert_close(model.state_dict()["weight"], before)
    return step(model, optimizer)


def test_an_exception_inside_the_step_restores_debiased_parameters(ranks):
    ranks.run(3, interrupted_step)


class Derived(torch.optim.SGD):
    """An optimizer for which torch runs the step hooks of this class and of its parent."""

    def step(self, closure=None):
        return super().step(closure)


def counts_rounds(rank):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # now torch hooks the parent's step
    module = nn.Linear(4, 2)
    optimizer = Derived(module.parameters(), lr=0.1)
    model = GossipDataParallel(module, optimizer, SGP(Complete(2)))
    step(model, optimizer)
    once = model.bytes_sent
    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        step(model, optimizer)
    hook.remove()
    step(model, optimizer)
    return once, model.bytes_sent


def test_a_derived_optimizer_takes_one_round_a_step(ranks):
    for once, twice in ranks.run(2, counts_rounds):
        assert twice == 2 * once > 0


def half_frozen(layer):
    layer.weight.requires_grad_(False)
    return layer


def replaces_parameters(rank):
    model, optimizer = wrap(SGP(Ring(1)), nn.Linear(4, 2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(RuntimeError, match="the optimizer must train the parameters it had"):
        optimizer.step()
    # Unfrozen after wrapping, or frozen with a gradient that the optimizer would still apply.
    for leave_frozen in (True, False):
        model, optimizer = wrap(SGP(Ring(1)), half_frozen(nn.Linear(4, 2)))
        model.module.weight.requires_grad_(not leave_frozen)
        model.module.weight.grad = torch.ones(2, 4) if leave_frozen else None
        with pytest.raises(RuntimeError, match="got 1 that are new, or were frozen then, or are"):
            optimizer.step()
    model, optimizer = wrap(SGP(Ring(1)), nn.Linear(4, 2))
    model.module.double()
    for use in (optimizer.step, model.consensus_distance, model.consensus().__enter__):
        with pytest.raises(RuntimeError, match="parameters must stay views of their flat buffers"):
            use()


def test_parameters_outside_the_flat_buffers_are_an_error(ranks):
    ranks.run(1, replaces_parameters)


def copies_are_an_error(rank):
    model, _ = wrap(SGP(Ring(1)), nn.Linear(4, 2))
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"must not be copied or pickled: copy its \.module"):
            copier(model)
    copy.deepcopy(model.module)


def test_copies_are_an_error(ranks):
    ranks.run(1, copies_are_an_error)


def joins_and_continues(rank, algorithm):
    model, optimizer = wrap(algorithm, nn.Linear(4, 2))
    for _ in range(2):
        with model.join():
            for _ in range(2 + rank):
                step(model, optimizer)
    assert not model._averager.joinable._join_config.enable
    step(model, optimizer)


def test_join_leaves_no_configuration_behind(ranks):
    for algorithm in ALGORITHMS:
        ranks.run(2, joins_and_continues, algorithm)


def steps_with_a_closure(rank):
    model, optimizer = wrap(SGP(StarWithChords(3)), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="closure must be None if push-sum weights differ"):
        optimizer.step(lambda: 0.0)
    return float(model.push_sum_weight)


def test_a_closure_is_an_error_if_the_optimizer_steps_on_the_numerator(ranks):
    ranks.run(3, steps_with_a_closure)


def minimizes_with_a_closure(rank):
    module = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)
    model = GossipDataParallel(module, optimizer, SGP(Complete(2)))
    inputs = torch.randn(20, 4)

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(5)]


def test_lbfgs_steps_with_its_closure(ranks):
    for losses in ranks.run(2, minimizes_with_a_closure):
        assert losses[-1] < 0.1 * losses[0]


def warnings_of(model, train, num_forwards):
    """Return the warnings of training forwards, each followed by a call of ``train``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_forwards):
            model(torch.ones(3, 4)).sum().backward()
            train()
    return [each for each in caught if "has not stepped" in str(each.message)]


def trains_with_another_optimizer(rank):
    model, optimizer = wrap(SGP(Ring(1)), nn.Linear(4, 2))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    assert not warnings_of(model, other.step, 150)
    model.train()
    assert not warnings_of(model, other.step, 9)
    (warning,) = warnings_of(model, other.step, 150)
    assert str(warning.message) == (
        "the optimizer given to GossipDataParallel has not stepped in 10 forwards, so ranks train "
        "apart; step that optimizer, or close() and wrap again with the new one"
    )
    assert (warning.category, warning.filename) == (UserWarning, inspect.getfile(warnings_of))

    model, optimizer = wrap(SGP(Ring(1)), nn.Linear(4, 2))
    assert not warnings_of(model, lambda: None, 150)  # accumulates its first gradient
    optimizer.step()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not warnings_of(model, other.step, 150)


def test_training_with_another_optimizer_is_a_warning(ranks):
    ranks.run(1, trains_with_another_optimizer)


def fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def steps_two_trainers(rank, algorithm):
    """Step A and B on rank 0, B and A on rank 1: they must not average A with B."""
    trainers = [wrap(algorithm, fill(nn.Linear(4, 2), value), lr=0.0) for value in (1.0, 2.0)]
    with pytest.raises(PeerError) as caught:
        trainers[rank][1].step()  # the other one is never reached
    values = [float(model.module.bias[0]) for model, _ in trainers]
    weights = [float(model.push_sum_weight) for model, _ in trainers]
    return str(caught.value), values, weights


def test_trainers_stepped_in_another_order_name_each_other(ranks):
    for algorithm in (SGP(Ring(2)), NoLoCo(RandomMatching(2), interval=1), LocalSGD(1)):
        step = 1 if isinstance(algorithm, LocalSGD) else 0
        outcomes = ranks.observe(2, steps_two_trainers, algorithm, group_timeout=2)
        (error, *state), (other_error, *other_state) = (outcome.value for outcome in outcomes)
        assert state == other_state == [[1.0, 2.0], [1.0, 1.0]]
        place, other_place = error.split(": ")[0], other_error.split(": ")[0]
        assert error.endswith(f"; waiting likewise: {other_place}"), error
        assert other_error.endswith(f"; waiting likewise: {place}"), other_error
        pattern = rf"rank (\d), trainer (\d+), step {step}"
        (rank, trainer), (other_rank, other_trainer) = (
            map(int, re.fullmatch(pattern, each).groups()) for each in (place, other_place)
        )
        assert (rank, other_rank, other_trainer - trainer) == (0, 1, 1)


def sends_own_messages(rank):
    """Receive from the other rank across a step, in messages of any length."""
    model, optimizer = wrap(SGP(Ring(2)), fill(nn.Linear(4, 2), 1.0), lr=0.0)
    received = []
    for numel in (1, 8192, sum(len(buffer) for buffer in model._buckets.buffers)):
        message = torch.full((numel,), 7.0)
        if rank == 0:
            message.zero_()
            work = torch.distributed.irecv(message, 1)
        optimizer.step()
        if rank == 1:
            work = torch.distributed.isend(message, 0)
        work.wait()
        received.append(bool((message == 7).all()))
    return received, float(model.module.bias[0])


def test_a_users_own_messages_pass_those_of_a_trainer(ranks):
    assert ranks.run(2, sends_own_messages) == [([True] * 3, 1.0)] * 2


def drops_its_replicas(averager):
    averager.reset()


def counts_a_step(averager):
    averager.counts.steps += 1


def counts_a_repeat(averager):
    averager.counts.repeats += 1


def is_a_round_ahead(averager):
    averager.round_index += 2


def has_a_large_weight(averager):
    averager._round_buffers[0].weight.fill_(1e300)


def has_no_weight(averager):
    averager._round_buffers[0].weight.fill_(0)


INT8 = SGP(Ring(2), compressor=Int8())
HEADERS = [
    (INT8, drops_its_replicas, "as long as the receiver expects, in bytes, got "),
    (SGP(Ring(2)), counts_a_step, "sent after as many optimizer steps, got "),
    (SGP(Ring(2), overlap=2), counts_a_repeat, "sent after as many steps without a training forw"),
    (LocalSGD(1), counts_a_step, "sent after as many optimizer steps, got 0 on rank 0 and 1 on "),
    (LeaderSGD(1, 1, 1), counts_a_step, "optimizer steps, got 0 on rank 0 and 1 on rank 1: step "),
    (NoLoCo(RandomMatching(2), 1), counts_a_step, "sent after as many optimizer steps, got "),
    (SGP(Ring(2)), is_a_round_ahead, "of the same round, got "),
]
MASSES = [
    (SGP(Ring(2)), has_a_large_weight, "its share 0.5, got 5e+299 from rank 1"),
    (SGP(Ring(2)), has_no_weight, "its share 0.5, got 0.0 from rank 1"),
    (SGP(Star(2)), has_a_large_weight, "in (0, 2], got 5e+299 from rank 1"),
]


def disagrees(rank, cases, num_steps):
    """Return the error of each case, and whether the parameters are as before the last step."""
    found = []
    for algorithm, disagree, _ in cases:
        model, optimizer = wrap(algorithm, nn.Linear(64, 8), lr=0.0)
        for _ in range(2):
            model.record_loss(1.0)
            optimizer.step()
        model.flush()
        if rank == 1:
            disagree(model._averager)
        before = model.module.weight.detach().clone()
        try:
            for _ in range(num_steps):
                model.record_loss(1.0)
                optimizer.step()
        except PeerError as error:
            found.append((str(error), torch.equal(before, model.module.weight)))
        else:
            found.append(("", False))
        if rank == 0:
            assert abs(float(model.push_sum_weight) - 1) < 1e-12
        torch.distributed.barrier()
    return found


def test_messages_that_do_not_fit_are_one_sentence_and_change_nothing(ranks):
    for rank, found in enumerate(ranks.run(2, disagrees, HEADERS, 3)):
        for (algorithm, _, sentence), (error, is_unchanged) in zip(HEADERS, found, strict=True):
            assert error.startswith(f"rank {rank}, "), (algorithm, error)
            assert sentence in error, (algorithm, error)
            assert "rank 0" in error
            assert "rank 1" in error
            assert is_unchanged, algorithm


def test_impossible_masses_name_their_sender(ranks):
    found = ranks.run(2, disagrees, MASSES, 1)[0]
    for (algorithm, _, sentence), (error, is_unchanged) in zip(MASSES, found, strict=True):
        assert sentence in error, (algorithm, error)
        assert is_unchanged, algorithm


def joins_unevenly(rank, algorithm):
    """Train with counts of unequal numbers of steps in join(), then with equal ones."""
    model, optimizer = wrap(algorithm, nn.Linear(4, 2))
    counts = model._averager.counts = StepCounts()

    def train(num_steps):
        for _ in range(num_steps):
            counts.steps += 1
            counts.forwards += 1
            step(model, optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.join():
            train(2 + 2 * rank)
        train(3)
        model.flush()
    return counts.steps


def test_counts_are_not_compared_in_join(ranks):
    for algorithm in (SGP(Ring(2)), SGP(Ring(2), overlap=2), LocalSGD(2)):
        assert ranks.run(2, joins_unevenly, algorithm) == [3, 3]


def test_a_process_without_a_group_is_an_error():
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sentence = "^process_group must be initialized, got none; call torch.distributed.init_process_g"
    with pytest.raises(ValueError, match=sentence):
        GossipDataParallel(module, optimizer, SGP(Ring(2)))
