"""Interrupted steps, replaced parameters, unusual optimizers: they work or raise an error."""

import copy
import functools
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel import GossipDataParallel
from pyparallel.comm import Collectives
from pyparallel.compression import Int8, compress_ddp
from pyparallel.gossip import SGP, GossipState, LocalSGD
from pyparallel.gossip.topology import Complete, Ring
from pyparallel.pipeline import GPipe, PipelineTrainer
from pyparallel.subnets import Partition, SubnetTrainer
from tests.gossip.every_algorithm import EVERY_ALGORITHM
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import step, wrap
from tests.workers import on_ranks


def fail(*_):
    raise KeyError("a user's hook")


@on_ranks(3)
def test_an_exception_inside_the_step_restores_debiased_parameters(rank):
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


class Derived(torch.optim.SGD):
    """An optimizer for which torch runs the step hooks of this class and of its parent."""

    def step(self, closure=None):
        return super().step(closure)


@on_ranks(2)
def test_a_derived_optimizer_takes_one_round_a_step(rank):
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
    assert model.bytes_sent == 2 * once > 0


def half_frozen(layer):
    layer.weight.requires_grad_(False)
    return layer


@on_ranks(1)
def test_parameters_outside_the_flat_buffers_are_an_error(rank):
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
    forward = functools.partial(model, torch.ones(2, 4))
    for use in (forward, optimizer.step, model.consensus_distance, model.consensus().__enter__):
        with pytest.raises(RuntimeError, match="parameters must stay views of their flat buffers"):
            use()


@on_ranks(1)
def test_replaced_layers_are_an_error(rank):
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


@on_ranks(1)
def test_a_step_of_another_optimizer_is_told_in_the_next_forward(rank):
    model, optimizer = wrap(SGP(Ring(1)), nn.Linear(4, 2))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, other)
    with pytest.warns(UserWarning, match="of the SGD that a trainer was given were written to"):
        step(model, optimizer)
    with model.no_sync():
        step(model, other)  # a local step
    step(model, optimizer)
    with warnings.catch_warnings(action="error"):
        for make in (lambda: model, lambda: GossipState(model, optimizer)):
            model(torch.ones(3, 4))
            make().load_state_dict(make().state_dict())
            model(torch.ones(3, 4))
    # The usual case: the name is used again, and the first optimizer is gone.
    optimizer = Derived(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="optimizer must be kept and stepped, got a forward in"):
        step(model, optimizer)
    model.eval()
    model(torch.ones(3, 4))
    model.close()
    step(GossipDataParallel(model.module, optimizer, SGP(Ring(1))), optimizer)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead is."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        return self.optimizer.step(closure)


@on_ranks(2)
def test_an_optimizer_may_be_wrapped(rank):
    """Wrap the trainer's optimizer, and give the trainer a wrapper."""
    model, optimizer = wrap(SGP(Complete(2)), nn.Linear(4, 2))
    step(model, Wrapper(optimizer))
    once = model.bytes_sent
    model.close()
    module = nn.Linear(4, 2)
    optimizer = Wrapper(torch.optim.SGD(module.parameters(), lr=0.1))
    model = GossipDataParallel(module, optimizer, SGP(Complete(2)))
    step(model, optimizer)
    assert once == model.bytes_sent > 0


@on_ranks(1)
def test_steps_and_forwards_are_counted_and_compile_nothing_again(rank):
    """Steps that are ordinary, repeated, local, and compiled."""
    model, optimizer = wrap(SGP(Ring(1)), nn.Linear(4, 2))
    counts, found = model._averager.run.counts, []
    step(model, optimizer)
    found.append((counts.steps, counts.repeats, counts.forwards))
    optimizer.step()
    model.eval()
    step(model, optimizer)
    found.append((counts.steps, counts.repeats, counts.forwards))
    model.train()
    with model.no_sync():
        step(model, optimizer)
    model(torch.ones(3, 4))
    found.append((counts.steps, counts.repeats, counts.forwards))
    torch._dynamo.reset()
    compilations = []
    compiled = torch.compile(model, backend=lambda graph, _: compilations.append(1) or graph)
    for _ in range(4):
        step(compiled, optimizer)
    found.append((counts.steps, counts.repeats, counts.forwards))
    assert found == [(1, 0, 1), (3, 2, 1), (4, 2, 3), (8, 2, 3)]
    assert len(compilations) == 1


@on_ranks(2)
def test_a_step_that_a_rank_has_skipped_is_told_where_all_ranks_meet(rank):
    """What all ranks do together after one has skipped a step is one error."""
    for algorithm in (SGP(Complete(2), overlap=1), LocalSGD(5)):
        model, optimizer = wrap(algorithm, nn.Linear(4, 2))
        for _ in range(3):
            step(model, optimizer)
        if rank == 0:
            step(model, optimizer)  # a message that the other rank never answers
        for together in (model.flush, model.consensus_distance, model.algorithm_state_dict):
            with pytest.raises(RuntimeError) as error:
                together()
            assert str(error.value) == (
                f"rank {rank}: the parameters that rank 1 averages must be sent after as many "
                "optimizer steps, got 4 on rank 0 and 3 on rank 1: step alike on all ranks, also "
                "inside no_sync(), or use join() for unequal numbers of batches"
            )
        model.close()


def test_a_process_without_a_group_is_an_error():
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sentence = "^process_group must be initialized, got none; call torch.distributed.init_process_g"
    with pytest.raises(ValueError, match=sentence):
        GossipDataParallel(module, optimizer, SGP(Ring(2)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def start_every_trainer():
    """Return gossip trainers with their optimizers, a pipeline, and a step of all, DDP's last."""
    kinds = ["sgp", "osgp-3", "localsgd", "adpsgd", "allreduce"]
    trained = [wrap(EVERY_ALGORITHM[kind](2), nn.Linear(4, 2)) for kind in kinds]
    subnets = SubnetTrainer(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), sgd,
                            Partition(), interval=1)  # fmt: skip
    replica = DistributedDataParallel(nn.Linear(4, 2))
    compress_ddp(replica, Int8())
    pipeline = PipelineTrainer(
        [nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss,
        sgd, GPipe(), num_microbatches=2, split=[1],
    )  # fmt: skip
    batch = torch.ones(2, 4)
    steps = [functools.partial(step, *each) for each in trained]
    steps.append(lambda: pipeline.step(batch, batch))
    steps.append(lambda: step(subnets, subnets.optimizer))
    steps.append(lambda: replica(batch).sum().backward())
    for take in steps:
        take()
    return trained, pipeline, steps


def steps_in_a_capture(rank):
    """Step each trainer as if a CUDA graph was captured."""
    *_, steps = start_every_trainer()
    with (
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
    ):
        for take in steps[:-1]:
            with pytest.raises(RuntimeError, match="must step outside of a CUDA graph, got a call"):
                take()
        steps[-1]()  # DDP may be captured, with its hook
    for take in steps:
        take()


def test_a_step_that_a_cuda_graph_would_capture_is_an_error(ranks):
    ranks.run(2, steps_in_a_capture)


def steps_after_the_group(rank, folder):
    """Step each trainer after destroy_process_group(): none may train alone without a word."""
    trained, pipeline, steps = start_every_trainer()
    dist.barrier()
    dist.destroy_process_group()
    join = {"init_method": f"file://{folder}/again", "rank": rank, "world_size": 2}
    for again in (False, True):
        if again:
            dist.init_process_group("gloo", **join)  # the pool destroys it
        for take in steps:
            with pytest.raises(RuntimeError, match="in every step, got one after destroy_process"):
                take()
    pipeline.state_dict()
    for model, optimizer in trained:
        model.state_dict()
        model.close()
        step(model.module, optimizer)


def test_a_step_after_the_process_group_is_an_error(ranks, tmp_path):
    ranks.run(2, steps_after_the_group, str(tmp_path))


def is_interrupted_in_an_average(rank, name):
    """Rank 0 is interrupted while it waits for an average, and goes on."""
    model, optimizer = wrap(EVERY_ALGORITHM[name](2), nn.Linear(4, 2))
    state = copy.deepcopy(model.algorithm_state_dict())
    wait = Collectives.all_reduce_

    def interrupted(*args):
        wait(*args)
        raise KeyboardInterrupt

    for _ in range(2):
        step(model, optimizer)
    if rank == 0:
        Collectives.all_reduce_ = interrupted
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer)
        Collectives.all_reduce_ = wait
        found = model._run.counts.steps
        text = f"got one after KeyboardInterrupt at rank 0, step {found}: ranks may have unequal p"
        with pytest.raises(RuntimeError, match=text):
            step(model, optimizer)
    else:
        step(model, optimizer)
    model.load_algorithm_state_dict(state)
    for _ in range(4):
        step(model, optimizer)


def test_after_an_interrupt_in_an_average_a_state_must_be_loaded(ranks):
    ranks.run(2, is_interrupted_in_an_average, "diloco")
