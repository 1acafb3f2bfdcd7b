"""What callers pass, checked, and the text that they get.

Doors: `intake`, `inputs`, `request`, `news`, `text`, `chat` and `beam_search`.
"""
