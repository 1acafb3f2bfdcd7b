"""Values that layers hand to attention backends and kernels.

Every file is a door: caches, scoring, norms and rotation, numbers in FP8 and INT4.
"""
