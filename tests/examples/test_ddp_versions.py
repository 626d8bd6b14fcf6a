"""How much longer the scripts for clusters are than those of the same training by DDP."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.test_clusters import TRAIN

MOST_MORE = 10
DDP_TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
module = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = DistributedDataParallel(module)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
DDP_MACHINES = """
import datetime
import os
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))  # "nccl" on GPUs
rank, num_ranks = dist.get_rank(), dist.get_world_size()
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
images, labels = images.float()[rank::num_ranks] / 16, labels[rank::num_ranks]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model = DistributedDataParallel(model)
for epoch in range(7):
    for batch in torch.randperm(len(labels)).split(32)[:14]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    if rank == 0 and epoch % 3 == 0:
        print(f"epoch {epoch}: loss {loss:.2f}")
dist.destroy_process_group()
"""
DDP_RAY = """
import argparse
from pathlib import Path
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def train(config):
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model = DistributedDataParallel(model)
    for step in range(config["steps"]):
        batch = torch.randint(len(labels), (32,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        print(get_context().get_world_rank(), step, loss.item())

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("runs/ray"))
    options = parser.parse_args()
    out = str(options.out.resolve())
    share = {"resources_per_worker": {"CPU": 0.5}}
    trainer = TorchTrainer(
        train,
        train_loop_config={"out": out, "steps": options.steps},
        scaling_config=ScalingConfig(num_workers=options.workers, **share),
        run_config=RunConfig(storage_path=out, failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()

if __name__ == "__main__":
    main()
"""


def machines():
    """Return the script of the page on several machines."""
    page = Path("docs/how_to/several_machines.md").read_text()
    return page.partition("```python\n")[2].partition("```")[0]


SCRIPTS = {
    "of Slurm's and Kubeflow's tests": (lambda: TRAIN, DDP_TRAIN),
    "several_machines.md": (machines, DDP_MACHINES),
    "ray_digits.py": (Path("examples/clusters/ray_digits.py").read_text, DDP_RAY),
}
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def code_of(text):
    """Return the lines with code, without comments; blank lines and docstrings have none."""
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, node.end_lineno + 1)
    }
    lines = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.start[0] not in docstrings:
            lines.setdefault(token.start[0], []).append(token.string)
    return Counter(" ".join(words) for words in lines.values())


def test_only_lines_with_code_count():
    text = '"""Doc.\n\nMore."""\n\n# a comment\nx = (\n    1,  # one\n)\ndef f():\n    """Doc."""\n'
    assert code_of(text) == Counter({"x = (": 1, "1 ,": 1, ")": 1, "def f ( ) :": 1})


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_ten_lines_more_than_by_ddp(name):
    ours, by_ddp = code_of(SCRIPTS[name][0]()), code_of(SCRIPTS[name][1])
    instead = by_ddp - ours  # import, wrapping, and what is printed: the same training otherwise
    assert 2 <= instead.total() <= 3, instead
    assert sum("DistributedDataParallel" in line for line in instead) == 2, instead
    assert (ours - by_ddp).total() - instead.total() <= MOST_MORE, ours - by_ddp
