"""What a step computes and sends: measured, or assumed."""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ...training.arguments import check_in, require
from .files import Table

VERSION = 1


@dataclass(frozen=True)
class Profile:
    """The seconds of a step on one rank, without communication.

    Args:
        computing: forward and backward.
        forward_share: of ``computing`` that is forward, in [0, 1).
        encoding: of a message: compression, or a copy.
        stepping: of the optimizer.
        rate: bytes/s of a link between ranks in each direction, if it was measured.
        latency: seconds of a message on it.
    """

    computing: float
    forward_share: float = 1 / 3
    encoding: float = 0.0
    stepping: float = 0.0
    rate: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        for name in ("computing", "encoding", "stepping"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be finite and not negative", value)
        check_in("forward_share", self.forward_share, "[0, 1)")

    def write(self, path: Path) -> None:
        """Write it as JSON, with the version of the format."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        path.write_text(json.dumps({"version": VERSION, **given}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Read what ``write`` wrote; a ValueError names the line of a mistake."""
        table = Table.read(path, json.loads)
        if (version := table.values.get("version")) != VERSION:
            table.fail(f"version must be {VERSION}, got {version!r}", "version")
        names = [field.name for field in fields(cls)]
        table.check_names(["version", *names])
        given = {name: name in ("computing", "rate") for name in names if name in table.values}
        given["computing"] = True
        if table.number("forward_share", 0.0, positive=False) >= 1:
            table.fail("forward_share must be below 1", "forward_share")
        return cls(**{name: table.number(name, positive=is_) for name, is_ in given.items()})
