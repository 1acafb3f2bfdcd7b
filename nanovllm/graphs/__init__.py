"""CUDA graphs of whole steps.

Doors: `step_graphs`.
"""
