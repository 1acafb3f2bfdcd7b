"""What callers pass, checked, and the text that they get.

Doors: `intake`, `request`, `news`, `chat` and `beam_search`.
"""
