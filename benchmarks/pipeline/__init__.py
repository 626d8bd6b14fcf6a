"""The parts of ``python -m benchmarks.pipeline.bench``, which measures the pipeline trainer."""
