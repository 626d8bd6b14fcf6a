"""A file of each rank with what it has measured, for ``python -m pyparallel watch``."""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["MetricsLog"]


def describe_place() -> str:
    """Return the host and its space of process ids, in which a number names one process."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


class MetricsLog:
    """Appends a line of JSON for each call of ``write`` to a file of this rank.

    Nothing is exchanged, so a rank writes whenever it likes. Leave the context, or call ``close``,
    when the rank has trained enough: one that has not is shown as dead once its process is gone.

    Args:
        folder: of the run, for all ranks; it is made.
        name: of the file, such as "replica-0" with a membership. None: "rank-3", by the default
            process group, or without one by torchrun's RANK.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str | None = None) -> None:
        if name is None:
            rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
            name = f"rank-{rank}"
        self._path = Path(folder, f"{name}.jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._common = {"process": os.getpid(), "place": describe_place()}
        self._append({})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step's metrics, such as ``{"loss": loss} | trainer.metrics()``."""
        self._append({"step": step, **metrics})

    def close(self) -> None:
        """Append that the rank has ended."""
        self._append({"ended": True})

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _append(self, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"time": time.time()} | self._common | {**values}) + "\n")
