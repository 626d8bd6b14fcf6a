"""Benchmarks of independent subnetwork training."""
