"""Attention over sequences of which each rank has a part."""
