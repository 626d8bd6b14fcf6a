"""Text for train_gossip.py: the bytes of Python's standard library."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from byte_transformer import build_transformer, byte_loss
from gossip_report import History
from learning_rate import rate
from standard_library import as_tensor, cut_windows, draw_windows, read_text_on_ranks

CONTEXT = 128  # bytes
NUM_WINDOWS = 512  # of the held-out bytes, evenly spaced, CONTEXT bytes each
STEPS_PER_DISTANCE = 50


class Text:
    """A small transformer with AdamW, warm-up, a cosine schedule per step and gradient clipping."""

    measure = "held-out bits per byte"

    def __init__(
        self,
        device: torch.device | None,
        seed: int,
        *,
        steps: int = 3000,
        batch_size: int = 4,
        lr: float = 2.4e-2,
    ) -> None:
        text = read_text_on_ranks(files_needed=dist.get_world_size())
        self.mine = as_tensor(text.train[dist.get_rank() :: dist.get_world_size()], device)
        self.windows = cut_windows(as_tensor(text.held_out, device), NUM_WINDOWS, CONTEXT + 1)
        self.size = text.size
        self.seed = seed
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_transformer(CONTEXT, width=32, num_layers=1, num_heads=2).to(self.mine.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), self.lr, betas=(0.5, 0.99), weight_decay=0.1
        )
        return model, optimizer

    def train(self, model, optimizer, straggle: Callable[[float], None]) -> History:
        """Run an ordinary training loop; only the measurements are specific."""
        history = History()
        draw = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate(step, self.steps)
        )
        for step in tqdm(range(self.steps), desc="steps", disable=dist.get_rank() != 0):
            begin = history.begin_step()
            windows = draw_windows(self.mine, self.batch_size, CONTEXT + 1, draw)
            optimizer.zero_grad()
            loss = byte_loss(model(windows[:, :-1]), windows[:, 1:])
            loss.backward()
            model.record_loss(loss)  # only LeaderSGD needs it
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            straggle(begin)
            optimizer.step()
            scheduler.step()
            history.end_step(begin, loss)
            if (step + 1) % STEPS_PER_DISTANCE == 0 or step + 1 == self.steps:
                history.record_distance(model)
        return history

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        losses = [byte_loss(model(part[:, :-1]), part[:, 1:]) for part in self.windows.split(32)]
        return float(torch.stack(losses).mean()) / math.log(2)

    def show(self, score: float) -> str:
        return f"{score:.3f}"

    def extra_rows(self, history: History) -> list[tuple[str, str]]:
        tokens = len(history.losses) * self.batch_size * CONTEXT * dist.get_world_size()
        return [
            ("text", self.size),
            ("tokens (bytes) per second", f"{tokens / history.wall_seconds:,.0f} on all ranks"),
        ]
