"""The parts of ``python -m benchmarks.bench_pipeline``, which measures the pipeline trainer."""
