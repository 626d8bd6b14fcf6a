"""A strategy that compresses the gradients of DDP."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ...compression import Compressor, ErrorFeedback, GradientCompression, TopK, compress_ddp
from ...training.nonfinite import NonFinitePolicy
from .rank_files import RankFiles


class CompressedDDPStrategy(RankFiles):
    """Train by DDP with compressed gradients, also on CPUs, where Lightning ignores hooks.

    To resume bit for bit, each rank's residuals are in a file beside the checkpoint,
    ``epoch=1.ckpt.rank-0-of-4``: keep them together.

    Args:
        compressor: of all gradients; None: ``ErrorFeedback(TopK(0.01))``.
        nonfinite: as of ``compress_ddp``; None: "allow" with a GradScaler, which then skips the
            step on all ranks, else "raise".
        kwargs: of Lightning's DDPStrategy, but its hooks.

    One rank alone, and a checkpoint of another number of ranks, are a ValueError.
    """

    _state: GradientCompression | None = None

    def __init__(
        self,
        compressor: Compressor | None = None,
        *,
        nonfinite: NonFinitePolicy | None = None,
        **kwargs: Any,
    ) -> None:
        if hooks := [key for key in kwargs if key.startswith("ddp_comm_") and kwargs[key]]:
            raise TypeError(
                f"CompressedDDPStrategy must not be given {', '.join(hooks)}: DDP has one hook, "
                "which compresses; give the compressor alone, or take DDPStrategy"
            )
        super().__init__(**kwargs)
        self._compressor = ErrorFeedback(TopK(0.01)) if compressor is None else compressor
        self._nonfinite = nonfinite

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        has_scaler = getattr(self.precision_plugin, "scaler", None) is not None
        policy = self._nonfinite or ("allow" if has_scaler else "raise")
        self._state = compress_ddp(self.model, self._compressor, nonfinite=policy)

    def metrics(self) -> dict[str, float]:
        """Return ``GradientCompression.metrics()``, for ``log_dict``; nothing before ``fit``."""
        return {} if self._state is None else self._state.metrics()

    @override
    def rank_state(self) -> dict[str, Any]:
        assert self._state is not None
        return self._state.state_dict()

    @override
    def load_rank_state(self, state: dict[str, Any]) -> None:
        assert self._state is not None
        self._state.load_state_dict(state)
