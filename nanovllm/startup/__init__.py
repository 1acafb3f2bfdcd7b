"""The start of a rank: model built and filled, kernels compiled, memory divided, graphs captured.

Door: `Builder.build`, in `builder.py`, whose `Built` has all that steps need.
"""
