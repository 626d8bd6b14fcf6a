"""The process groups of point-to-point messages."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class P2PGroups:
    """The process groups of point-to-point messages.

    Args:
        headers: gloo, as the host reads headers. None: upward and downward are gloo and carry the
            headers of their direction too: a gloo thread that reads and writes at once is slow at
            both.
        upward: payloads from a rank to a higher one.
        downward: payloads to a lower one. NCCL runs a group's messages between two ranks in one
            order, so the two directions must not share a group.
        device: of the payloads.
    """

    headers: dist.ProcessGroup | None
    upward: dist.ProcessGroup
    downward: dist.ProcessGroup
    device: torch.device

    @property
    def supports_tags(self) -> bool:
        """Return whether messages are matched by tag; NCCL ignores tags."""
        return self.device.type == "cpu"

    @property
    def supports_inline(self) -> bool:
        """Return whether a payload may be sent behind its header.

        The receiver does not know its length: only gloo's TCP transport, the default on Linux,
        receives a message that is shorter than the tensor that was posted for it.
        """
        transport = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP")
        is_tcp = sys.platform == "linux" and transport.upper() == "TCP"
        return is_tcp and self.headers is None and self.supports_tags
