"""The shape of a pipeline: its numbers of stages, microbatches and ranks."""

from dataclasses import dataclass

from ...training.arguments import check_integer, require


@dataclass(frozen=True)
class PipelineShape:
    """The shape of a pipeline; stage s is on rank s mod ranks, as in torch's looped schedules.

    Args:
        num_microbatches: microbatches of one step.
    """

    num_stages: int
    num_microbatches: int
    num_ranks: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_integer(name, value)
        got = f"{self.num_stages} stages for {self.num_ranks} ranks"
        rule = "num_stages must be a multiple of num_ranks"
        require(self.num_stages % self.num_ranks == 0, rule, got)

    @property
    def stages_per_rank(self) -> int:
        """Return the number of stages on each rank."""
        return self.num_stages // self.num_ranks

    def stages(self, rank: int) -> range:
        """Return the stages of a rank, ascending."""
        return range(rank, self.num_stages, self.num_ranks)
