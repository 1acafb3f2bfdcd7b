"""Kernels of layers with a state for each sequence: Gated DeltaNet, short convolutions.

Doors: `delta_decode` and `delta_prompt`; `delta_tokens`; `short_conv`; `copies`.
"""
