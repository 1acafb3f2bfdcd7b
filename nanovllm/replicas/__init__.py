"""Several engines that act as one, each in a process of its own.

Doors: `supervisor`, `assembly` and `remote_request`, for `LLM` alone.
"""
