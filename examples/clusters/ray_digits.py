"""Train on digits in Ray, where a worker that dies is replaced while the others train on.

pip install "ray[train]" torchft scikit-learn
python examples/clusters/ray_digits.py
python -m pyparallel watch runs/ray
"""

import argparse
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn

from pyparallel import SGP, GossipDataParallel
from pyparallel.gossip import Lighthouse
from pyparallel.integrations.metrics_log import MetricsLog
from pyparallel.integrations.ray import ElasticConfig


def train(config):
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model = GossipDataParallel(model, optimizer, SGP(), membership=Lighthouse())
    with MetricsLog(config["out"], f"rank-{get_context().get_world_rank()}") as log:
        for step in range(config["steps"]):
            batch = torch.randint(len(labels), (32,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            counts = {"epoch": model.epoch, "members": len(model.members)}
            log.write(step, {"loss": loss.item()} | counts | model.metrics())
        model.leave()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("runs/ray"))
    options = parser.parse_args()
    out = str(options.out.resolve())
    share = {"resources_per_worker": {"CPU": 0.5}}  # of a core: three fit on two
    trainer = TorchTrainer(
        train,
        train_loop_config={"out": out, "steps": options.steps},
        torch_config=ElasticConfig(),  # new: the rest is as for any TorchTrainer
        scaling_config=ScalingConfig(num_workers=options.workers, **share),
        run_config=RunConfig(storage_path=out, failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
