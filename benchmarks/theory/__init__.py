"""Theory that the benchmarks and the tests check, but that no trainer needs."""
