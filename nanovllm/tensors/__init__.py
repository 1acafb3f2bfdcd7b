"""Arguments that layers pass to attention backends and kernels.

Every file is a door: caches, scoring, norms and rotation, values in FP8 and INT4.
"""
