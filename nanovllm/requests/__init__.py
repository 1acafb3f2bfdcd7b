"""Requests: checked input, and the text of their output.

Doors: `intake`, `inputs`, `request`, `news`, `text`, `detokenizer`, `chat`, `renderings` and
`beam_search`.
"""
