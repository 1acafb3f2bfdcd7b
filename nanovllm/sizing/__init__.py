"""How much memory each part of an engine gets, and how large a model is.

Doors: `memory`, `activations` and `model_size`.
"""
