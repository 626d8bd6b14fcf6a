"""What the benchmarks share: timing, rows, processes, links."""
