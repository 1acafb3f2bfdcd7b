"""The start of a rank: model built and filled, kernels compiled, memory divided, graphs captured.

Doors: `builder`, whose `Built` has all that steps need; `build`, what is known before.
"""
