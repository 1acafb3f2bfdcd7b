"""Layers that keep a state of constant size for each sequence, in the place of attention.

Doors: `gated_delta_net` and `short_conv`, the layers; `state_rows`; `snapshots`, their prefix
cache.
"""
