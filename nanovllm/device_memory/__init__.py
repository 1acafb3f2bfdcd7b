"""Memory by the CUDA driver: what other processes open, and what goes while its addresses stay.

Doors: `driver` and `pieces`.
"""
