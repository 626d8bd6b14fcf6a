"""Strategies for Lightning's ``Trainer``: gossip, and compressed gradients in DDP.

Importing this registers them with their defaults, for ``Trainer(strategy="gossip")`` and
``Trainer(strategy="compressed_ddp")``.
"""

from ..versions import require_version

require_version("lightning", "2.4")

from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from .compressed import CompressedDDPStrategy  # noqa: E402
from .gossip import GossipStrategy  # noqa: E402

__all__ = ["CompressedDDPStrategy", "GossipStrategy"]

for _name, _strategy in (
    ("gossip", GossipStrategy),
    ("compressed_ddp", CompressedDDPStrategy),
):
    StrategyRegistry.register(_name, _strategy, (_strategy.__doc__ or "").partition("\n")[0], True)
