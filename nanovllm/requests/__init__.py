"""Requests: checked input, and the text of their output.

Doors: `intake`, `inputs`, `request`, `news`, `text`, `detokenizer`, `chat`, `renderings`,
`json_params` and `beam_search`.
"""
