"""A default device other than that of the user's tensors, as ``torch.set_default_device`` sets it.

"meta" stands for any: a tensor of ours that lay there could neither be read nor sent.
"""

import ast
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel, PipelineTrainer, SubnetTrainer
from pyparallel.compression import Int8, ddp_hook
from pyparallel.optim import AdamW
from pyparallel.pipeline import GPipe, Interlocking, LinearHead, PipeDream2BW, PipeOptim, ZeroBubble
from pyparallel.subnets import Partition
from tests.gossip.every_algorithm import COVERING, EVERY_ALGORITHM
from tests.workers import call_each

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
    trainer.register_comm_hook(*ddp_hook(Int8(), trainer))

    def step():
        module.zero_grad()
        nn.functional.mse_loss(trainer(X), TARGET).backward()

    return module, step, lambda: None, lambda: None


def train_beside_the_default(rank, start, *arguments):
    """Train with and without another default device; the parameters must be equal."""
    found = []
    for device in (nullcontext(), torch.device("meta")):
        torch.manual_seed(rank)
        module, step, flush, save = start(*arguments)
        with device:
            for _ in range(4):
                step()
            flush()
            save()
        found.append([each.detach().clone() for each in module.parameters()])
        dist.barrier()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_trainers_work_beside_another_default_device(ranks):
    of_gossip = [(train_beside_the_default, start_gossip, name) for name in COVERING]
    ranks.run(4, call_each, of_gossip)
    others = [(train_beside_the_default, start_pipeline, schedule) for schedule in SCHEDULES]
    others += [(train_beside_the_default, start) for start in (start_subnets, start_ddp)]
    ranks.run(2, call_each, others)


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
