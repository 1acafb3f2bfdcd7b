"""A trace as a page: read, summarised, explained and drawn. Imports no torch.

Doors: `reading`, `summary`, `page` and `words`.
"""
