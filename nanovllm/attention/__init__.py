"""Attention backends: one file each behind the interface of `base.py`."""
