"""Benchmarks: ``make bench`` runs every ``bench_X.py``, interleaved with the best peer of each."""
