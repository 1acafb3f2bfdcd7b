"""Helpers of the scheduler: admission, the ends of sequences, prefixes that decodes share, images
that are encoded.

Doors: `admission`, `stopping`, `prefixes` and `encoder_cache`.
"""
