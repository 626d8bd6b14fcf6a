"""Long runs of rounds and trainers: memory, file descriptors, threads and mass stay the same."""
