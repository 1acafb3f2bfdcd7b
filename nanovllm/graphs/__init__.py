"""CUDA graphs of whole steps.

Doors: `step_graphs`; `static_inputs`, for the shapes that there are.
"""
