"""Layers whose sequences have a state instead of keys and values of all their tokens."""
