"""The processes of a model that is split over GPUs.

Doors: `workers`, `meeting` and `processes`.
"""
