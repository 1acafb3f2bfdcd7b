"""Several engines that act as one, each in a process of its own.

Doors: `replicas` and `assembly`, for `LLM` alone.
"""
