"""Collectives and shared memory of the ranks of a model that is split over devices.

Doors: `group`, what ranks do together; `store`, how they meet; `bulk` and `peer_memory`, by which
layers and kernels sum over GPUs.
"""
