"""The parts of ``python -m benchmarks.gossip.bench``, which measures the gossip trainers."""
