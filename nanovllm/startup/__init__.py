"""The start of a rank: model built and filled, kernels compiled, memory divided, graphs captured.

Door: `builder`, whose `Built` has all that steps need.
"""
