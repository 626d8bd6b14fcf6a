"""Steps of every trainer: what they hold."""

from benchmarks.soak.trainers import STARTS
from benchmarks.soak.watch import Sample, watch


def run(rank: int, case: str, steps: int) -> tuple[list[Sample], dict[str, float]]:
    """Take steps and complete communication; return this rank's samples."""
    running = STARTS[case]()
    samples = watch(lambda index: running.step(), steps)
    running.finish()
    return samples, {}
