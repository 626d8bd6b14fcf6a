"""How the elements of a GPU's block are divided among its threads: machine code, and a sweep."""
