"""The sizes of a pipeline: how many stages, on how many ranks, for how many microbatches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineShape:
    """Stages dealt to ranks in turn, as torch's looped schedules have it: stage s on s mod ranks.

    Args:
        num_stages: parts that the model is cut into.
        num_microbatches: microbatches that one call of the trainer feeds in.
        num_ranks: processes; divides ``num_stages``.
    """

    num_stages: int
    num_microbatches: int
    num_ranks: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_stages % self.num_ranks:
            raise ValueError(
                f"num_stages must be a multiple of num_ranks, got {self.num_stages} stages for "
                f"{self.num_ranks} ranks"
            )

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank holds."""
        return self.num_stages // self.num_ranks

    def stages(self, rank: int) -> range:
        """The stages of a rank, ascending."""
        return range(rank, self.num_stages, self.num_ranks)
