"""Helpers of the scheduler: whether one more may start, and what running sequences share.

Doors: `admission` and `prefixes`.
"""
