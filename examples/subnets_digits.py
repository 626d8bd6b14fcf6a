"""Handwritten digits for train_subnets.py: scikit-learn's 1,797 of 8 x 8 pixels, no download."""

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from gossip_digits import share_of_rank
from handwritten_digits import load_images
from pyparallel.subnets import Partition, SubnetTrainer, recalibrate
from subnets_report import History

EPOCHS_PER_SCORE = 2


class Digits:
    """A convolutional network with BatchNorm, SGD with momentum, and a cosine learning rate."""

    measure = "test accuracy"
    scale = "unscaled"  # BatchNorm compensates

    def __init__(
        self,
        device: torch.device | None,
        seed: int,
        *,
        epochs: int = 20,
        steps: int | None = None,
        batch_size: int = 16,
        lr: float = 0.05,
    ) -> None:
        train, self.test = load_images(device)
        self.images, self.labels = share_of_rank(train)
        steps_per_epoch = -(-len(self.labels) // batch_size)
        self.seed = seed
        self.epochs = -(-steps // steps_per_epoch) if steps else epochs
        self.max_steps = steps or self.epochs * steps_per_epoch
        self.batch_size = batch_size
        self.lr = lr

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 16, 256), nn.BatchNorm1d(256), nn.ReLU(),
            nn.Linear(256, 10),
        ).to(self.labels.device)  # fmt: skip

    def partition(self) -> Partition:
        """Cut all hidden dimensions; an nn.Sequential needs no rules."""
        return Partition(seed=self.seed)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, self.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)

    def train(self, trainer: SubnetTrainer) -> History:
        """Train with an ordinary loop; only flush() and full_model() are specific to subnets."""
        history = History()
        shuffle = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, self.epochs)
        for epoch in tqdm(range(self.epochs), desc="epochs", disable=dist.get_rank() != 0):
            order = torch.randperm(len(self.labels), generator=shuffle).to(self.labels.device)
            batches = order.split(self.batch_size)[: self.max_steps - len(history.losses)]
            for batch in batches:
                begin = history.begin_step()
                trainer.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(trainer(self.images[batch]), self.labels[batch])
                loss.backward()
                trainer.optimizer.step()
                history.end_step(begin, loss)
            scheduler.step()
            if (epoch + 1) % EPOCHS_PER_SCORE == 0 or epoch + 1 == self.epochs:
                trainer.flush()  # ranks may have unequal numbers of batches
                with trainer.full_model() as module:
                    history.note_score(self.score(module))
        return history

    @torch.no_grad()
    def score(self, module: nn.Module) -> float:
        """Return the test accuracy, with running statistics recomputed for the full model."""
        recalibrate(module, self.images.split(128))
        images, labels = self.test
        return float((module.eval()(images).argmax(1) == labels).float().mean())

    def show(self, score: float) -> str:
        return f"{score:.2%}"

    def extra_rows(self, history: History) -> list[tuple[str, str]]:
        return []
