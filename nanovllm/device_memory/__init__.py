"""Memory by the CUDA driver, which other processes open, or which goes while its addresses stay.

Doors: `driver` and `pieces`.
"""
