"""A trace as a page: read, summed up, explained and drawn. Imports no torch.

Doors: `reading`, `summary`, `page` and `words`.
"""
