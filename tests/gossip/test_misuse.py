"""Interrupted steps, replaced parameters, unusual optimizers: they work or raise an error."""

import copy
import functools
import inspect
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP
from pyparallel.gossip.topology import Complete, Ring
from pyparallel.pipeline import GPipe, PipelineTrainer
from tests.gossip.every_algorithm import EVERY_ALGORITHM
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


def replaces_layers(rank):
    def replace(module):
        module[3] = nn.Linear(8, 2)

    def assign(module):
        module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)

    def set_parameter(module):
        module[3].weight = nn.Parameter(torch.zeros(2, 8))

    def replace_nested(module):
        module[3] = nn.Sequential(module[3], nn.Linear(2, 2))

    for change in (replace, assign, set_parameter, replace_nested):
        model, optimizer = wrap(SGP(Ring(1)))
        step(model, optimizer)
        change(model.module)
        with pytest.raises(RuntimeError, match=r"must keep the parameters it was wrapped with"):
            step(model, optimizer)
    model, optimizer = wrap(SGP(Ring(1)))  # what needs no training is the user's
    model.module[2], model.module[3] = nn.Tanh(), nn.Identity()
    step(model, optimizer)


def test_replaced_layers_are_an_error(ranks):
    ranks.run(1, replaces_layers)


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


def test_a_process_without_a_group_is_an_error():
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sentence = "^process_group must be initialized, got none; call torch.distributed.init_process_g"
    with pytest.raises(ValueError, match=sentence):
        GossipDataParallel(module, optimizer, SGP(Ring(2)))


def steps_after_the_group(rank, folder):
    """Step each trainer after destroy_process_group(): none may train alone without a word."""
    kinds = ["sgp", "osgp-3", "localsgd", "adpsgd", "allreduce"]
    trained = [wrap(EVERY_ALGORITHM[kind](2), nn.Linear(4, 2)) for kind in kinds]
    pipeline = PipelineTrainer(
        [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.1), GPipe(), num_microbatches=2, split=[1],
    )  # fmt: skip
    batch = torch.ones(2, 4)
    steps = [functools.partial(step, *each) for each in trained]
    steps.append(lambda: pipeline.step(batch, batch))
    for take in steps:
        take()
    dist.barrier()
    dist.destroy_process_group()
    for take in steps:
        with pytest.raises(RuntimeError, match=r"in every step, got one after destroy_process_gr"):
            take()
    pipeline.state_dict()
    for model, optimizer in trained:
        model.state_dict()
        model.close()
        step(model.module, optimizer)
    join = {"init_method": f"file://{folder}/again", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **join)  # the pool destroys it


def test_a_step_after_the_process_group_is_an_error(ranks, tmp_path):
    ranks.run(2, steps_after_the_group, str(tmp_path))
