"""Benchmarks of the ops, one file per op."""
