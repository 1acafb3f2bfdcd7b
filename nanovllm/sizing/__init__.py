"""The memory of each part of an engine, and the size of a model.

Doors: `memory`, `activations` and `model_size`.
"""
