"""Logits to tokens with all that requests wish for: controls, log-probabilities, structures.

Doors: `control_table` for what requests want, `extras` for what the device computes of it.
"""
