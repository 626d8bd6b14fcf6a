"""The parts of ``python -m benchmarks.bench_compression``, which measures the compressors."""
