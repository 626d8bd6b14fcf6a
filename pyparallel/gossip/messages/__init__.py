"""Messages of gossip rounds: what is sent to whom, and the headers by which it is checked."""

from .exchange import NeighborExchange, Received, Round
from .flags import Flags
from .header import MessageHeaders
from .symmetric_memory import SymmetricMemoryExchange

__all__ = [
    "Flags",
    "MessageHeaders",
    "NeighborExchange",
    "Received",
    "Round",
    "SymmetricMemoryExchange",
]
