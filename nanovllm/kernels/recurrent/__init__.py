"""Gated DeltaNet over the states of sequences.

Doors: `delta_decode` and `delta_prompt`.
"""
