"""The parts of ``python -m benchmarks.compression.bench``, which measures the compressors."""
