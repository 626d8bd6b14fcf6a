"""Train an autoencoder of digits with Lightning; the lines with a comment are what gossip changes.

torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py
"""

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyparallel import SGP
from pyparallel.integrations.lightning import GossipStrategy  # needs lightning 2.4


class LitAutoEncoder(lightning.LightningModule):
    """That of Lightning's quick start."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log_dict(self.trainer.strategy.metrics())  # rank/bytes_sent and others, if you like
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch), sync_dist=True)

    def loss(self, batch):
        return nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
train = DataLoader(TensorDataset(images[:1536]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(images[1536:]), batch_size=32)
autoencoder = LitAutoEncoder()
options = {"accelerator": "cpu", "devices": 2, "log_every_n_steps": 1}
options |= {"enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(
    max_epochs=2,
    logger=CSVLogger("runs/lightning"),
    strategy=GossipStrategy(SGP(overlap=1)),  # was "ddp"
    **options,
)
before = trainer.validate(autoencoder, test, verbose=False)[0]["loss"]
trainer.fit(autoencoder, train, test)
trainer.print(f"loss {before:.2f}, after 2 epochs loss {trainer.callback_metrics['loss']:.2f}")

path = trainer.checkpoint_callback.best_model_path  # .../epoch=1-step=48.ckpt
trainer = lightning.Trainer(
    max_epochs=8,
    logger=CSVLogger("runs/lightning"),
    strategy=GossipStrategy(SGP(overlap=1)),
    **options,
)
trainer.fit(autoencoder, train, test, ckpt_path=path)
trainer.print(f"resumed, after 8 epochs loss {trainer.callback_metrics['loss']:.2f}")
trained = LitAutoEncoder.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
