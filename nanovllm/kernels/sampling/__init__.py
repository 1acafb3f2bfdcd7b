"""Kernels from logits to tokens: controls, thresholds, log-probabilities, and the draw.

Every file is a door.
"""
