"""Faults in every trainer: each rank ends within the timeout, with an error that names the rank."""
