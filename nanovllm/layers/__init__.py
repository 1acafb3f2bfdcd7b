"""Layers that models are made of, and `Build`, by which they choose their kernels.

Every file is a door.
"""
