"""Weights that change while an engine stays: new ones in place, checked and counted.

Doors: `ledger` and `parcel` for what travels, `weights` for a rank's model, `sharing` for other
processes.
"""
