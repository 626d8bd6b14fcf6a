"""Benchmarks of the gossip trainer; run ``python -m benchmarks.gossip.bench``."""
