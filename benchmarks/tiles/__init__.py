"""How kernels load and store, read in their machine code."""
