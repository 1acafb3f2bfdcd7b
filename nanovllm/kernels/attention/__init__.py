"""Attention over a paged KV cache, and the preparation of queries, keys and values for it.

Every file is a door.
"""
