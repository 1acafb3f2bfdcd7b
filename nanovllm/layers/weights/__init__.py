"""Formats that the matrix of a product is stored in, and how each is loaded and multiplied.

Doors: `weight` for layers, `quantized` for what takes several formats, `shard` for a rank's part.
"""
