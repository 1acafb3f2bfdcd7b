"""Several engines that act as one, each in a process of its own.

Doors: `supervisor` and `assembly`, for `LLM` alone.
"""
