"""Images on the device: towers that encode them, and a store of what they have encoded.

Doors: `encoder`, which has both; `towers`, which makes a model's tower.
"""
