"""Parts of compare_compression and bench_compression."""
