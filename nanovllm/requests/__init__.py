"""Requests: checked input, and the text of their output.

Doors: `intake`, `inputs`, `request`, `news`, `text`, `detokenizer`, `chat` and `beam_search`.
"""
