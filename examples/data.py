"""The data of the examples: scikit-learn's digits, and Python's own source text. No downloads."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

NUM_TEST = 360  # of 1,797 digits: the last fifth of a fixed shuffle
HELD_OUT = 20  # one in this many files of text
TEST_FOLDERS = {"test", "tests", "idle_test"}


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images (n, 1, 8, 8) in [0, 1] and labels (n,), then the held-out ones."""
    import sklearn.datasets

    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-NUM_TEST], order[-NUM_TEST:]
    return images[train], labels[train], images[test], labels[test]


def share(*tensors: Tensor) -> list[Tensor]:
    """Return this rank's samples of each tensor, as many as every other rank has."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return [tensor[rank::num_ranks][: len(tensor) // num_ranks] for tensor in tensors]


def load_files() -> tuple[list[bytes], list[bytes]]:
    """Return the files of Python's standard library for training, and those held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_bytes() for path in find_files(folder)]
    if len(files) < HELD_OUT:
        raise RuntimeError(f"Python's library must be installed as source files in {folder}")
    return [file for i, file in enumerate(files) if i % HELD_OUT], files[::HELD_OUT]


def find_files(root: Path) -> list[Path]:
    """Return a folder's modules and packages without tests, sorted by name."""
    return sorted(walk(root), key=lambda path: path.relative_to(root).as_posix())


def walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.name not in TEST_FOLDERS and (path / "__init__.py").is_file():
            yield from walk(path)


def as_tensor(files: list[bytes]) -> Tensor:
    """Return the files as (n,) int64, separated by zero bytes."""
    return torch.frombuffer(bytearray(b"\0".join(files)), dtype=torch.uint8).long()


def cut_windows(text: Tensor, count: int, length: int) -> Tensor:
    """Return (count, length) windows, evenly spaced over the text."""
    starts = torch.arange(count) * (len(text) - length) // count
    return text[starts.unsqueeze(1) + torch.arange(length)]


def draw_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return (count, length) windows at random positions."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]
