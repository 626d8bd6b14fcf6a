"""Shared parts of the benchmarks: timing, rows, processes, links."""
