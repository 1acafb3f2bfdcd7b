"""Decisions of the start: formats, kernels, and how much memory each part gets.

Doors: `build`, `memory`, `activations` and `model_size`.
"""
