"""Text for train_gossip.py: the bytes of Python's own standard library, no download."""

import hashlib
import math
import platform
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from gossip_report import History
from pyparallel.comm import agree

CONTEXT = 128  # bytes
HELD_OUT = 20  # every so manieth file is never trained on
NUM_WINDOWS = 512  # of the held-out bytes, evenly spaced, CONTEXT bytes each
STEPS_PER_DISTANCE = 50
TEST_FOLDERS = {"test", "tests", "idle_test"}


class Text:
    """A small transformer, AdamW, warm-up and a cosine from step to step, clipping by norm."""

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
        files = [path.read_bytes() for path in find_files(Path(sysconfig.get_paths()["stdlib"]))]
        train = [file for i, file in enumerate(files) if i % HELD_OUT]
        held_out = files[::HELD_OUT]
        agree([("text", hashlib.sha256(b"\0".join(files)).hexdigest())], find_problem(train))
        self.mine = as_tensor(train[dist.get_rank() :: dist.get_world_size()], device)
        self.windows = cut_windows(as_tensor(held_out, device), NUM_WINDOWS)
        self.size = (
            f"{sum(map(len, train)):,} bytes in {len(train)} files, held out "
            f"{sum(map(len, held_out)):,} in {len(held_out)}; Python {platform.python_version()}"
        )
        self.seed = seed
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Transformer(width=32, num_layers=1, num_heads=2).to(self.mine.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), self.lr, betas=(0.5, 0.99), weight_decay=0.1
        )
        return model, optimizer

    def train(self, model, optimizer, linger: Callable[[float], None]) -> History:
        """The user's own loop: nothing in it knows of gossip but the measuring at its end."""
        history = History()
        draw = torch.Generator().manual_seed(self.seed * 1000 + dist.get_rank())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        for step in tqdm(range(self.steps), desc="steps", disable=dist.get_rank() != 0):
            begin = history.begin_step()
            starts = torch.randint(len(self.mine) - CONTEXT, (self.batch_size, 1), generator=draw)
            optimizer.zero_grad()
            loss = byte_loss(model, self.mine[starts + torch.arange(CONTEXT + 1)])
            loss.backward()
            model.record_loss(loss)  # only LeaderSGD has a use for it
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            linger(begin)
            optimizer.step()
            scheduler.step()
            history.end_step(begin, loss)
            if (step + 1) % STEPS_PER_DISTANCE == 0 or step + 1 == self.steps:
                history.note_distance(model)
        return history

    def rate(self, step: int) -> float:
        """What to multiply lr by: up within the first twentieth, then down along a cosine."""
        warm_up = (step + 1) / (self.steps / 20)
        return min(warm_up, 0.05 + 0.95 * (1 + math.cos(math.pi * step / self.steps)) / 2)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        losses = [byte_loss(model, windows) for windows in self.windows.split(32)]
        return float(torch.stack(losses).mean()) / math.log(2)

    def show(self, score: float) -> str:
        return f"{score:.3f}"

    def facts(self, history: History) -> list[tuple[str, str]]:
        tokens = len(history.losses) * self.batch_size * CONTEXT * dist.get_world_size()
        return [
            ("text", self.size),
            ("tokens (bytes) per second", f"{tokens / history.wall_seconds:,.0f} on all ranks"),
        ]


def find_files(root: Path) -> list[Path]:
    """The modules and packages in a folder without their tests, in an order of their names."""
    return sorted(walk(root), key=lambda path: path.relative_to(root).as_posix())


def walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.name not in TEST_FOLDERS and (path / "__init__.py").is_file():
            yield from walk(path)


def find_problem(files: list[bytes]) -> str | None:
    if len(files) >= dist.get_world_size():
        return None
    return (
        "the standard library must be there as source, at least one file for each of "
        f"{dist.get_world_size()} ranks, got {len(files)} in {sysconfig.get_paths()['stdlib']}"
    )


def as_tensor(files: list[bytes], device: torch.device | None) -> Tensor:
    """(n,) int64, one file after another with a zero byte between."""
    return torch.frombuffer(bytearray(b"\0".join(files)), dtype=torch.uint8).to(device).long()


def cut_windows(text: Tensor, count: int) -> Tensor:
    """(count, CONTEXT + 1) from all over the text."""
    starts = torch.arange(count) * (len(text) - CONTEXT - 1) // count
    return text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]


def byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Nats per byte, of each byte after the first given those before it in its window."""
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Transformer(nn.Module):
    """Decoder only, over bytes: (batch, length) int64 to (batch, length, 256) logits.

    A short causal convolution lets the first layer see pieces of words rather than letters.
    """

    def __init__(self, width: int, num_layers: int, num_heads: int, reach: int = 4) -> None:
        super().__init__()
        self.reach = reach
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.pieces = nn.Conv1d(width, width, reach)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        letters = self.bytes(text)
        past = nn.functional.pad(letters.transpose(1, 2), (self.reach - 1, 0))
        pieces = self.pieces(past).transpose(1, 2)
        places = self.places.weight[: text.shape[1]]
        return self.logits(self.norm(self.blocks(letters + pieces + places)))


class Block(nn.Module):
    """Attention to all bytes before, then two linear layers for each by itself."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))
