"""Formats in which the matrix of a product is stored, and their loading and multiplication.

Doors: `weight` for layers, `quantized` for all formats in few bits, `shard` for a rank's part;
`fp8`, `int8`, `int4`, `int8_head`, `mxfp4` and `onednn` for whoever makes one.
"""
