"""Formats in which the matrix of a product is stored, and their loading and multiplication.

Doors: `weight` for layers, `quantized` for those in few bits, `shard` for a rank's part; formats
`fp8`, `int8`, `int4`, `int8_head`, `mxfp4`, `onednn`, `tied`, and `converted` for new tensors.
"""
