"""The parts of ``python -m benchmarks.bench_gossip``, which measures the gossip trainers."""
