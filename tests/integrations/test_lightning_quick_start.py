"""The script of the page about Lightning, started in two ways, trains as the loop by hand."""

import csv
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DistributedSampler

from pyparallel import SGP, GossipDataParallel, topology
from tests.docs.snippets import ROOT, blocks_of, run_command
from tests.integrations.by_hand import train

pytestmark = pytest.mark.slow  # test_lightning.py has a fast check of this host
(SCRIPT,) = [b for b in blocks_of(ROOT / "docs/how_to/lightning.md") if b.script]


def by_hand(rank):
    """Return the losses of this rank and the consensus after 8 epochs, without Lightning."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
    module = nn.Sequential()
    module.encoder, module.decoder = encoder, decoder
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    model = GossipDataParallel(module, optimizer, SGP(topology.OnePeerExponential(2), overlap=1))
    images = torch.tensor(load_digits().data, dtype=torch.float32)[:1536] / 16
    sampler, losses = DistributedSampler(images, 2, rank, seed=0), []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        losses += train(model, [optimizer], images[list(sampler)].split(32))
    with model.consensus() as averaged:
        return losses, {key: value.clone() for key, value in averaged.state_dict().items()}


def check_run(folder, losses, weights):
    """Compare with what Lightning's logger and checkpoint have of both runs of the script."""
    rows = []
    for version in range(2):  # the run, and the one that resumes it
        with Path(
            folder, f"runs/lightning/lightning_logs/version_{version}/metrics.csv"
        ).open() as file:
            rows += [row for row in csv.DictReader(file) if row["train_loss"]]
        assert float(rows[-1]["rank/bytes_sent"]) > 0
    assert [float(row["train_loss"]) for row in rows] == losses
    (path,) = Path(folder).glob("runs/lightning/lightning_logs/version_1/checkpoints/*.ckpt")
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved.keys() == weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(saved[key], tensor), key


@pytest.mark.parametrize("launcher", ["torchrun --standalone --nproc-per-node 2", sys.executable])
def test_the_quick_start_trains_as_the_loop_by_hand_from_both_launchers(ranks, tmp_path, launcher):
    (losses, weights), _ = ranks.run(2, by_hand)
    (tmp_path / "autoencoder.py").write_text(SCRIPT.runnable)
    assert "resumed, after 8 epochs" in run_command(f"{launcher} autoencoder.py", tmp_path)
    check_run(tmp_path, losses, weights)
