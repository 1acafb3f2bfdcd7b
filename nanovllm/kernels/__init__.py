"""Triton kernels, each with the PyTorch function that launches it. Every file is a door.

They are imported only on use: by the Triton-based attention backends and by layers built with
`fused=True`. With TRITON_INTERPRET=1 in the environment they run on CPU tensors.
"""
