"""The parts of ``python -m benchmarks.bench_interlocking``."""
