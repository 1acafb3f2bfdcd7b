"""Attention over a paged KV cache, and what is done to queries, keys and values before it.

Every file is a door.
"""
