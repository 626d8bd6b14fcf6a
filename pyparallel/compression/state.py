"""State of a compressor for one buffer, saved and loaded by parameter name."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops._corrupt import raise_if_counted
from ..training.arguments import require
from .layout import BufferLayout


@dataclass
class CompressorState:
    """State of a compressor for one buffer between steps; ``compress`` writes it in place.

    Args:
        step: number of messages made so far.
        entries: (numel,) tensors with a number per entry of the buffer: residuals, momenta.
        pieces: by piece name, tensors of any shape, such as factors of a matrix.
        common: tensors of the whole buffer, valid with any layout.
        hints: tensors that affect the speed of a step but not its result; never saved.
        inner: states of wrapped compressors, in order.
    """

    layout: BufferLayout
    rank: int = 0
    step: int = 0
    entries: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    common: dict[str, Tensor] = field(default_factory=dict)
    hints: dict[str, Tensor] = field(default_factory=dict)
    inner: "list[CompressorState]" = field(default_factory=list)

    def begin_message(self, x: Tensor) -> None:
        """Check that a buffer to encode has this layout, and count its message.

        A RuntimeError, on this rank alone, says that a GPU has found corrupt entries in messages
        that were decoded earlier; the host does not wait for it.
        """
        self.layout.check(x)
        raise_if_counted(x.device)
        self.step += 1

    def begin_inner(self) -> "CompressorState":
        """Return the state of the one wrapped compressor, at this step, and count a message."""
        inner = self.inner[0].at_step(self.step)
        self.step += 1
        return inner

    def at_step(self, step: int) -> "CompressorState":
        """Set the number of messages made so far, and return this state."""
        self.step = step
        return self

    def seed(self, base: int, *, shared: bool = False) -> int:
        """Return the seed of this buffer's draws: the same on all ranks, or one per rank.

        Buffers of different parameters have different seeds, so that their errors are uncorrelated.
        """
        mine = 0 if shared else 1 + self.rank
        text = f"{base}/{mine}/{self.layout.seed_names}"
        return zlib.crc32(text.encode()) | base % 2**32 << 32

    def parameter_state(self) -> dict[str, dict[str, Tensor]]:
        """Return views of the state of each parameter, in its shape: {name: {key: tensor}}."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self.layout.names}
        for key, flat in self.entries.items():
            for name, part in zip(self.layout.names, self.layout.split(flat), strict=True):
                found[name][key] = part
        for name, tensors in self.pieces.items():
            found[name].update(tensors)
        for index, inner in enumerate(self.inner):
            for name, tensors in inner.parameter_state().items():
                found[name].update({f"{index}.{key}": each for key, each in tensors.items()})
        return found

    def common_state(self) -> dict[str, Any]:
        """Return the state that belongs to no parameter: {key: tensor or number}."""
        found: dict[str, Any] = {"step": self.step, **self.common}
        for index, inner in enumerate(self.inner):
            found.update({f"{index}.{key}": each for key, each in inner.common_state().items()})
        return found

    @torch.no_grad()
    def load_state(
        self, parameter_state: dict[str, dict[str, Tensor]], common_state: dict[str, Any]
    ) -> None:
        """Load ``parameter_state`` and ``common_state``, possibly of another layout."""
        for name, key, mine in self._named():
            saved = parameter_state.get(name, {}).get(key)
            if saved is not None:
                _check_shape(f"the parameter {name}", key, saved, mine)
                mine.copy_(saved)
        self.step = common_state.get("step", self.step)
        for key, mine in self.common.items():
            if key in common_state:
                _check_shape("all parameters", key, common_state[key], mine)
                mine.copy_(common_state[key])
        for index, inner in enumerate(self.inner):
            inner.load_state(
                {name: _under(index, tensors) for name, tensors in parameter_state.items()},
                _under(index, common_state),
            )

    def _named(self) -> list[tuple[str, str, Tensor]]:
        """Return (name, key, tensor) of this state without inner states."""
        own = [
            (name, key, part)
            for key, flat in self.entries.items()
            for name, part in zip(self.layout.names, self.layout.split(flat), strict=True)
        ]
        return own + [
            (name, key, tensor)
            for name, tensors in self.pieces.items()
            for key, tensor in tensors.items()
        ]


def _under(index: int, values: dict[str, Any]) -> dict[str, Any]:
    start = f"{index}."
    return {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}


def _check_shape(owner: str, key: str, saved: Tensor, mine: Tensor) -> None:
    rule = "state must be of this model"
    got = f"a {key} of shape {list(saved.shape)} for {owner}, expected shape {list(mine.shape)}"
    require(saved.shape == mine.shape, rule, got)
