"""Handwritten digits for train_gossip.py: scikit-learn's 1,797 images of 8 x 8 pixels."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from digits_net import build_net
from gossip_report import History
from handwritten_digits import Batch, load_images


class Digits:
    """A small convolutional net with SGD, momentum and a cosine schedule per epoch."""

    measure = "test accuracy"

    def __init__(
        self,
        device: torch.device | None,
        seed: int,
        *,
        epochs: int = 40,
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

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_net().to(self.labels.device)
        optimizer = torch.optim.SGD(
            model.parameters(), self.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        return model, optimizer

    def train(self, model, optimizer, straggle: Callable[[float], None]) -> History:
        """Run an ordinary training loop; only ``join`` and the measurements are specific."""
        history = History()
        shuffle = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        for _ in tqdm(range(self.epochs), desc="epochs", disable=dist.get_rank() != 0):
            order = torch.randperm(len(self.labels), generator=shuffle).to(self.labels.device)
            batches = order.split(self.batch_size)[: self.max_steps - len(history.losses)]
            with model.join():  # ranks may have unequal numbers of batches
                for batch in batches:
                    begin = history.begin_step()
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(
                        model(self.images[batch]), self.labels[batch]
                    )
                    loss.backward()
                    model.record_loss(loss)  # only LeaderSGD needs it
                    straggle(begin)
                    optimizer.step()
                    history.end_step(begin, loss)
            scheduler.step()
            history.record_distance(model)
        return history

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        images, labels = self.test
        return float((model(images).argmax(1) == labels).float().mean())

    def show(self, score: float) -> str:
        return f"{score:.2%}"

    def extra_rows(self, history: History) -> list[tuple[str, str]]:
        return []


def share_of_rank(batch: Batch) -> Batch:
    """Return every num_ranks-th sample, starting at this rank."""
    images, labels = batch
    shard = slice(dist.get_rank(), None, dist.get_world_size())
    return images[shard], labels[shard]
