"""What both strategies share: files of each rank beside Lightning's checkpoint."""

import os
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from ...training.arguments import require
from ..rank_files import load_on_all_ranks, rank_file

_NUM_RANKS = "pyparallel_num_ranks"  # the key in a checkpoint with a file of each rank beside it


class RankFiles(DDPStrategy):
    """Save and load the states that differ between ranks, each in a file beside the checkpoint."""

    _loaded_from: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saved_as: dict[str, Any] = {}

    def _path_of(self, path: Any) -> Any:
        """Return the first rank's name of a checkpoint: a metric in it may differ on this one."""
        return self._saved_as.get(str(path), path)

    @override
    def setup(self, trainer: Any) -> None:
        rule, got = f"{type(self).__name__} must have at least 2 ranks", "devices=1 and num_nodes=1"
        fix = "give Trainer(devices=2) or more, or start the script by torchrun"
        require(self.world_size > 1, rule, got, fix)
        super().setup(trainer)

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank; all ranks call it together."""
        raise NotImplementedError

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Load what ``rank_state`` has returned; all ranks call it together."""
        raise NotImplementedError

    @override
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        own, filepath = str(filepath), self.broadcast(filepath)
        if own != str(filepath):
            self._saved_as[own] = filepath
        if checkpoint.get("optimizer_states"):  # else save_weights_only, or nothing was trained
            checkpoint[_NUM_RANKS] = self.world_size
            path = _rank_file(filepath)
            self.checkpoint_io.save_checkpoint(self.rank_state(), path, storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove all files of a checkpoint that the first rank sees; without it those of a rank.

        Ranks may differ in which checkpoint is their worst; the first one decides.
        """
        filepath = self._path_of(filepath)
        if self.is_global_zero:
            for rank in range(self.world_size):
                self.checkpoint_io.remove_checkpoint(_rank_file(filepath, rank))
        elif not os.path.exists(filepath):  # already removed, or on another machine's disk
            self.checkpoint_io.remove_checkpoint(_rank_file(filepath))
        super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = checkpoint_path = self._path_of(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if _NUM_RANKS not in checkpoint:  # of another strategy
            return

        def read() -> dict[str, Any]:
            rule = f"ckpt_path must be of a run with {self.world_size} ranks"
            fix = "to go on from its weights alone, use the module's load_from_checkpoint"
            got = f"one with {checkpoint[_NUM_RANKS]}"
            require(checkpoint[_NUM_RANKS] == self.world_size, rule, got, fix)
            return self.checkpoint_io.load_checkpoint(_rank_file(self._loaded_from))

        self.load_rank_state(load_on_all_ranks(read))


def _rank_file(path: Any, rank: int | None = None) -> str:
    path = os.path.realpath(path) if os.path.islink(path) else path  # save_last="link"
    return rank_file(path, rank)
