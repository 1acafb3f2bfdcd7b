"""Helpers of the scheduler: when one more may start, why one ends, what running sequences share.

Doors: `admission`, `stopping` and `prefixes`.
"""
