"""The parts of ``python -m benchmarks.interlocking.bench``."""
