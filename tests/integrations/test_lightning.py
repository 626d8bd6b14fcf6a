"""Lightning's ``Trainer`` with our strategies trains as the same loop written by hand."""

import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.harness.libraries import load
from pyparallel import SGP, GossipDataParallel, topology
from pyparallel.compression import Cast, ErrorFeedback, TopK, ddp_hook
from pyparallel.gossip import AllReduce

L = load("lightning")
from pyparallel.integrations.lightning import CompressedDDPStrategy, GossipStrategy  # noqa: E402

NUM_BATCHES, BATCH_SIZE = 6, 4


class AutoEncoder(L.LightningModule):
    """That of Lightning's quick start, which also keeps what it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 8))
        self.losses, self.validation, self.metrics = [], [], {}

    def forward(self, inputs):
        return self.decoder(self.encoder(inputs))

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[0])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log_dict(self.trainer.strategy.metrics())
        return loss

    def validation_step(self, batch, batch_idx):
        self.validation.append(self.loss(batch).item())

    def on_train_epoch_end(self):
        self.metrics = self.trainer.strategy.metrics()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Alternating(AutoEncoder):
    """Two optimizers, which Lightning leaves to the module."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for each in self.optimizers():
            each.zero_grad()
        self.manual_backward(loss)
        for each in self.optimizers():
            each.step()

    def configure_optimizers(self):
        return make_several(self)


def make_several(module):
    first = torch.optim.SGD(module.encoder.parameters(), lr=0.1, momentum=0.9)
    return [first, torch.optim.Adam(module.decoder.parameters(), lr=0.05)]


def samples():
    return torch.rand(2 * NUM_BATCHES * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(1))


def fit(folder, strategy, epochs, module=None, resume=None, **options):
    module = module or AutoEncoder()
    options = {"enable_progress_bar": False, "enable_model_summary": False, **options}
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **options,
    )
    loader = DataLoader(TensorDataset(samples()), BATCH_SIZE)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer, module


def batches_of(rank, epoch=None):
    """Return a rank's batches: in order for validation, shuffled as Lightning does in an epoch."""
    sampler = DistributedSampler(range(len(samples())), 2, rank, shuffle=epoch is not None)
    sampler.set_epoch(epoch or 0)
    return samples()[list(sampler)].split(BATCH_SIZE)


def by_hand(rank, algorithm, epochs, make_optimizer=None, accumulated=1, clip=None, dtype=None):
    """Return losses, validation's losses, the last consensus and the bytes, without Lightning."""
    module = AutoEncoder()
    optimizer = (make_optimizer or AutoEncoder.configure_optimizers)(module)
    model = GossipDataParallel(module, optimizer, algorithm)
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    losses, validation = [], []
    for epoch in range(epochs):
        for index, batch in enumerate(batches_of(rank, epoch), 1):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = nn.functional.mse_loss(model(batch), batch)
            losses.append(loss.item())
            (loss / accumulated).backward()
            if index % accumulated == 0:
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                for each in several:
                    each.step()
                    each.zero_grad()
        with model.consensus() as averaged, torch.no_grad():
            for batch in batches_of(rank):
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    validation.append(nn.functional.mse_loss(averaged(batch), batch).item())
    model.flush()
    with model.consensus() as averaged:
        weights = copy.deepcopy(model.state_dict())
    return losses, validation, weights, model.metrics()["rank/bytes_sent"]


def launched(function):
    """Run as a rank that torchrun has started, which Lightning recognizes."""

    def run(rank, *arguments):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        values = dict(zip(names, map(str, (rank, rank, dist.get_world_size(), 2, 0)), strict=True))
        with mock.patch.dict(os.environ, values | {"TORCHELASTIC_RUN_ID": "test"}):
            return function(rank, *arguments)

    return run


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def gossip(rank, folder):
    return launched(check_gossip)(rank, folder)


def check_gossip(rank, folder):
    for overlap in (0, 1):
        expected, validation, weights, sent = by_hand(
            rank, SGP(topology.Ring(2), overlap=overlap), epochs=2
        )
        strategy = GossipStrategy(lambda n, overlap=overlap: SGP(topology.Ring(n), overlap=overlap))
        trainer, module = fit(f"{folder}/{overlap}", strategy, 2)
        assert module.losses == expected, (overlap, module.losses, expected)
        assert module.validation == validation, (overlap, module.validation, validation)
        assert module.metrics["rank/bytes_sent"] == sent > 0
        assert trainer.callback_metrics["rank/bytes_sent"] > 0
        assert module.metrics["rank/staleness"] == overlap
        assert_equal(module.state_dict(), weights)


def test_gossip_in_lightning_is_the_loop_by_hand(ranks, tmp_path):
    ranks.run(2, gossip, str(tmp_path))
