"""Independent subnetwork training: what its theory says, in numbers."""
