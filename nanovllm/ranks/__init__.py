"""The processes of a model that is split over GPUs.

Doors: `workers`, `meeting`, `processes`, and `letter` for what is too large for their channel.
"""
