"""Independent subnetwork training: each rank trains a part of the width on its own."""

from .quadratic import Quadratic, drawn_sketches, every_order, permutation_sketches

__all__ = ["Quadratic", "drawn_sketches", "every_order", "permutation_sketches"]
