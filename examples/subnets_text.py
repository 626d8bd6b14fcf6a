"""Text for train_subnets.py: the bytes of Python's own standard library, no download."""

import math

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from byte_transformer import build_transformer, byte_loss
from learning_rate import rate
from pyparallel.subnets import FeedForward, Heads, Partition, SubnetTrainer
from standard_library import as_tensor, cut_windows, draw_windows, read_text_on_ranks
from subnets_report import History

CONTEXT = 128  # bytes
NUM_WINDOWS = 256  # of the held-out bytes, evenly spaced, CONTEXT bytes each
STEPS_PER_SCORE = 100
BLOCKS = 2
HEADS = 8


class Text:
    """A small transformer, AdamW, warm-up and cosine decay, and gradient clipping by norm."""

    measure = "held-out bits per byte"
    scale = "averaged"  # unscaled blocks would add n times as much in the full model

    def __init__(
        self,
        device: torch.device | None,
        seed: int,
        *,
        steps: int = 1000,
        batch_size: int = 4,
        lr: float = 1e-2,
    ) -> None:
        text = read_text_on_ranks(files_needed=dist.get_world_size())
        self.mine = as_tensor(text.train[dist.get_rank() :: dist.get_world_size()], device)
        self.windows = cut_windows(as_tensor(text.held_out, device), NUM_WINDOWS, CONTEXT + 1)
        self.size = text.size
        self.seed = seed
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr

    def build(self) -> nn.Module:
        return build_transformer(CONTEXT, 64, BLOCKS, HEADS).to(self.mine.device)

    def partition(self) -> Partition:
        """Cut each block's heads and hidden units; all other parameters are shared."""
        block = [Heads(qkv="qkv", project="project"), FeedForward("mlp.0", "mlp.2")]
        return Partition({f"{place}": block for place in range(1, 1 + BLOCKS)}, self.seed)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, self.lr, betas=(0.9, 0.99), weight_decay=0.1)

    def train(self, trainer: SubnetTrainer) -> History:
        """Train with an ordinary loop; only full_model() is specific to subnets."""
        history = History()
        draw = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            trainer.optimizer, lambda step: rate(step, self.steps)
        )
        for step in tqdm(range(self.steps), desc="steps", disable=dist.get_rank() != 0):
            begin = history.begin_step()
            windows = draw_windows(self.mine, self.batch_size, CONTEXT + 1, draw)
            trainer.optimizer.zero_grad()
            loss = byte_loss(trainer(windows[:, :-1]), windows[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(trainer.subnet.parameters(), 1.0)
            trainer.optimizer.step()
            scheduler.step()
            history.end_step(begin, loss)
            if (step + 1) % STEPS_PER_SCORE == 0 or step + 1 == self.steps:
                with trainer.full_model() as module:
                    history.note_score(self.score(module))
        return history

    @torch.no_grad()
    def score(self, module: nn.Module) -> float:
        losses = [byte_loss(module(part[:, :-1]), part[:, 1:]) for part in self.windows.split(32)]
        return float(torch.stack(losses).mean()) / math.log(2)

    def show(self, score: float) -> str:
        return f"{score:.3f}"

    def extra_rows(self, history: History) -> list[tuple[str, str]]:
        tokens = len(history.losses) * self.batch_size * CONTEXT * dist.get_world_size()
        return [
            ("text", self.size),
            ("tokens (bytes) per second", f"{tokens / history.wall_seconds:,.0f} on all ranks"),
        ]
