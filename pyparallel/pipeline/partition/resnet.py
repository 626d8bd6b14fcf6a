"""The layers of ResNets, as timm and torchvision have them."""

from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint


def timm_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of timm's ``ResNet``."""
    parts: Any = model
    stem = nn.Sequential(parts.conv1, parts.bn1, parts.act1, parts.maxpool)
    blocks = _blocks(parts)
    if parts.grad_checkpointing:
        blocks = [_Recomputed(block) for block in blocks]
    return [stem, *blocks, _TimmHead(parts.global_pool, parts.fc, parts.drop_rate)]


def torchvision_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of torchvision's ``ResNet``."""
    parts: Any = model
    stem = nn.Sequential(parts.conv1, parts.bn1, parts.relu, parts.maxpool)
    return [stem, *_blocks(parts), nn.Sequential(parts.avgpool, nn.Flatten(), parts.fc)]


def _blocks(model: Any) -> list[nn.Module]:
    return list(chain(model.layer1, model.layer2, model.layer3, model.layer4))


class _Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, features, use_reentrant=False)
        return output


class _TimmHead(nn.Module):
    def __init__(self, global_pool: nn.Module, fc: nn.Module, drop_rate: float) -> None:
        super().__init__()
        self.global_pool = global_pool
        self.fc = fc
        self._drop_rate = float(drop_rate)

    def forward(self, features: Tensor) -> Tensor:
        pooled = self.global_pool(features)
        # The mode of fc, which also the whole model's train() and eval() set.
        logits: Tensor = self.fc(dropout(pooled, self._drop_rate, self.fc.training))
        return logits
