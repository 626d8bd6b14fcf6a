"""What users do beside training changes no bit of it: every habit with every trainer.

A new trainer or option is a line of `TRAINERS`, a new habit one of `HABITS`.
"""

import ast
import copy
import cProfile
import gc
import os
import pickle
import sys
import threading
import warnings
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel, PipelineTrainer, SubnetTrainer
from pyparallel.compression import Int8, compress_ddp
from pyparallel.optim import AdamW
from pyparallel.pipeline import GPipe, Interlocking, LinearHead, PipeDream2BW, PipeOptim, ZeroBubble
from pyparallel.subnets import Partition
from tests.cases import nightly, slow
from tests.gossip.every_algorithm import COVERING, EVERY_ALGORITHM, FEW

PACKAGE = Path(__file__).resolve().parents[2] / "pyparallel"
FACTORIES = {
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
X, TARGET = torch.ones(8, 4), torch.eye(8, 4)
SCHEDULES = [GPipe(), ZeroBubble(), PipeOptim(), PipeDream2BW(), Interlocking(1, LinearHead(4))]


def build_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def start_gossip(name):
    module = build_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    algorithm = EVERY_ALGORITHM[name](dist.get_world_size())
    trainer = GossipDataParallel(module, optimizer, algorithm)

    def step():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(trainer(X), TARGET)
        loss.backward()
        trainer.record_loss(loss)
        optimizer.step()

    return module, step, trainer.flush, trainer.algorithm_state_dict


def start_pipeline(schedule):
    module = build_module()
    trainer = PipelineTrainer(
        module, nn.functional.mse_loss, AdamW, schedule,
        num_microbatches=2, num_stages=2, split=[2],
    )  # fmt: skip
    trainer.prepare(X, TARGET)
    return module, lambda: trainer.step(X, TARGET), trainer.flush, trainer.state_dict


def start_subnets():
    module = build_module()
    trainer = SubnetTrainer(module, lambda p: torch.optim.SGD(p, lr=0.1), Partition(), interval=2)

    def step():
        trainer.optimizer.zero_grad()
        nn.functional.mse_loss(trainer(X), TARGET).backward()
        trainer.optimizer.step()

    return trainer.subnet, step, trainer.flush, trainer.state_dict


def start_ddp():
    module = build_module()
    trainer = nn.parallel.DistributedDataParallel(module)
    compress_ddp(trainer, Int8())

    def step():
        module.zero_grad()
        nn.functional.mse_loss(trainer(X), TARGET).backward()

    return module, step, lambda: None, lambda: None


@contextmanager
def setting(set_it, value, before):
    set_it(value)
    try:
        yield
    finally:
        set_it(before)


def traced(module):
    return setting(sys.settrace, lambda *_: None, None)


def profiled(module):
    return setting(sys.setprofile, lambda *_: None, None)


def of_default_dtype(dtype):
    return lambda module: setting(torch.set_default_dtype, dtype, torch.float32)


def on_default_device(module):
    """As ``torch.set_default_device`` sets it; tensors on "meta" can neither be read nor sent."""
    return torch.device("meta")


@contextmanager
def warnings_are_errors(module):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def deterministic(module):
    return setting(torch.use_deterministic_algorithms, True, False)


@contextmanager
def c_profiled(module):
    with cProfile.Profile():
        yield


@contextmanager
def profiled_by_torch(module):
    with torch.profiler.profile(record_shapes=True, with_stack=True) as kept:
        yield
    module.profile = [kept]  # which ends later than messages in flight


@contextmanager
def without_collections(module):
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def with_many_collections(module):
    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def hooked(module):
    """Hooks of gradients, before and after they are accumulated, and of modules."""
    handles = [module.register_forward_hook(lambda *_: None)]
    for each in module.parameters():
        handles.append(each.register_hook(lambda gradient: None))
        handles.append(each.register_post_accumulate_grad_hook(lambda parameter: None))
    yield
    for handle in handles:
        handle.remove()


def after_each_step(function):
    """Return a habit that calls function(module) after each step."""

    @contextmanager
    def habit(module):
        yield lambda: function(module)

    return habit


def fork(module):
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


KEPT = []


def average(module):
    """As an exponential moving average of the weights."""
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)


def infer(module):
    with torch.inference_mode():
        next(module.parameters()).sum()


def gradients_of(module):
    return [each.grad for each in module.parameters()]


HABITS = {
    "another default device": on_default_device,
    "bfloat16 by default": of_default_dtype(torch.bfloat16),
    "float64 by default": of_default_dtype(torch.float64),
    "sys.settrace": traced,
    "sys.setprofile": profiled,
    "cProfile": c_profiled,
    "torch.profiler": profiled_by_torch,
    "warnings are errors": warnings_are_errors,
    "anomaly mode": lambda module: torch.autograd.set_detect_anomaly(True),
    "deterministic algorithms": deterministic,
    "no garbage collection": without_collections,
    "much garbage collection": with_many_collections,
    "hooks": hooked,
    "fork": after_each_step(fork),
    "pickle": after_each_step(pickle.dumps),
    "deepcopy": after_each_step(copy.deepcopy),
    "state_dict kept": after_each_step(lambda module: KEPT.append(module.state_dict())),
    "moving average": after_each_step(average),
    "gradients kept": after_each_step(
        lambda module: KEPT.extend(p.grad for p in module.parameters())
    ),
    "inference between steps": after_each_step(infer),
    "collectives of one's own": after_each_step(lambda module: dist.all_reduce(torch.ones(3))),
    "random numbers of one's own": after_each_step(lambda module: torch.rand(3)),
    "in a thread": None,
}


def train(rank, habit, start, *arguments):
    """Return parameters after four steps with a habit, or without."""
    torch.manual_seed(rank)
    module, step, flush, save = start(*arguments)
    failed = []

    def run(then=None):
        try:
            for _ in range(4):
                step()
                if then:
                    then()
            flush()
            save()
        except BaseException as error:
            failed.append(error)

    if habit == "in a thread":
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    elif habit is None:
        run()
    else:
        with HABITS[habit](module) as then:
            run(then if callable(then) else None)
    if failed:
        raise failed[0]
    KEPT.clear()
    dist.barrier()
    return [each.detach().clone() for each in module.parameters()]


def compare_with_habits(rank, habits, start, *arguments):
    plain = train(rank, None, start, *arguments)
    for habit in habits:
        found = train(rank, habit, start, *arguments)
        assert all(map(torch.equal, plain, found)), f"{habit} changes bits"


TRAINERS = {
    **{f"{name} of 4": (4, start_gossip, name) for name in COVERING},
    **{type(schedule).__name__: (2, start_pipeline, schedule) for schedule in SCHEDULES},
    "SubnetTrainer": (2, start_subnets),
    "DistributedDataParallel": (2, start_ddp),
}


SLOW = {"sys.settrace", "sys.setprofile", "cProfile", "torch.profiler", "much garbage collection"}


def covering():
    """Return a default device for some trainers, and for those of two ranks fast habits too."""
    first = "another default device"
    rest = cycle([habit for habit in HABITS if habit != first and habit not in SLOW])
    on_two = [name for name, (num_ranks, *_) in TRAINERS.items() if num_ranks == 2]
    habits = {f"{name} of 4": [first] for name in FEW}
    return habits | {name: [first, next(rest), next(rest)] for name in on_two}


@pytest.mark.parametrize(
    "habits",
    [
        dict([*covering().items()][::3]),
        slow(covering()),
        nightly({name: [*HABITS] for name in TRAINERS}),
    ],
    ids=["some", "covering", "all"],
)
def test_habits_change_no_bit(ranks, subtests, habits):
    for name, chosen in habits.items():
        num_ranks, *of_trainer = TRAINERS[name]
        with subtests.test(name):
            ranks.run(num_ranks, compare_with_habits, chosen, *of_trainer, time_limit=120)


def find_calls_without_device(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_factory = ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES
            if is_factory and "device" not in {keyword.arg for keyword in node.keywords}:
                yield f"{path}:{node.lineno}"


def test_every_tensor_of_the_package_names_its_device():
    assert [
        call for path in PACKAGE.rglob("*.py") for call in find_calls_without_device(path)
    ] == []
