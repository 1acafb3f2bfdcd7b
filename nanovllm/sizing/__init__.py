"""What is decided at the start: formats, kernels, and how much memory is for what.

Doors: `build`, `memory`, `activations` and `model_size`.
"""
