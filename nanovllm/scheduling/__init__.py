"""Helpers of the scheduler: admission, the ends of sequences, and prefixes that decodes share.

Doors: `admission`, `stopping` and `prefixes`.
"""
