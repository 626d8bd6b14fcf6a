"""The source text of Python's standard library as bytes, some held out; no download."""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pyparallel.comm import check_consistent_across_ranks

HELD_OUT = 20  # one in this many files is held out
TEST_FOLDERS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Text:
    """Files, in the same order on all machines."""

    train: list[bytes]
    held_out: list[bytes]

    @property
    def size(self) -> str:
        return (
            f"{sum(map(len, self.train)):,} bytes in {len(self.train)} files, held out "
            f"{sum(map(len, self.held_out)):,} in {len(self.held_out)}; "
            f"Python {platform.python_version()}"
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"\0".join([*self.train, *self.held_out])).hexdigest()


def read_text() -> Text:
    files = [path.read_bytes() for path in find_files(Path(sysconfig.get_paths()["stdlib"]))]
    return Text([file for i, file in enumerate(files) if i % HELD_OUT], files[::HELD_OUT])


def read_text_on_ranks(files_needed: int) -> Text:
    """Return the text; all ranks check that it is the same on each, and long enough."""
    text = read_text()
    check_consistent_across_ranks(
        [("text", text.digest)], find_validation_error(text, files_needed)
    )
    return text


def find_validation_error(text: Text, files_needed: int) -> str | None:
    if len(text.train) >= files_needed:
        return None
    return (
        f"the standard library must be installed as source, at least {files_needed} files for "
        f"{dist.get_world_size()} ranks, got {len(text.train)} in "
        f"{sysconfig.get_paths()['stdlib']}"
    )


def find_files(root: Path) -> list[Path]:
    """Return a folder's modules and packages without tests, sorted by name."""
    return sorted(walk(root), key=lambda path: path.relative_to(root).as_posix())


def walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.name not in TEST_FOLDERS and (path / "__init__.py").is_file():
            yield from walk(path)


def as_tensor(files: list[bytes], device: torch.device | None = None) -> Tensor:
    """Return the files as (n,) int64, separated by zero bytes."""
    return torch.frombuffer(bytearray(b"\0".join(files)), dtype=torch.uint8).to(device).long()


def cut_windows(text: Tensor, count: int, length: int) -> Tensor:
    """Return (count, length) windows, evenly spaced over the text."""
    starts = torch.arange(count) * (len(text) - length) // count
    return text[starts.unsqueeze(1) + torch.arange(length)]


def draw_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return (count, length) windows at random positions."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]
