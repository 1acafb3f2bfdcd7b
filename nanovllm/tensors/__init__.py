"""Values that layers hand to attention backends and kernels.

Each file is a door: caches, scoring, norms and rotation, numbers in FP8 and INT4.
"""
