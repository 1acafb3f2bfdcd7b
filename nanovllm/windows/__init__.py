"""Blocks of layers that slide over a window, where others see all tokens.

Doors: `pages`, `places` and `sliding_blocks`.
"""
