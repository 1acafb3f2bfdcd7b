"""Helpers that know nothing of the rest, and `context`, by which layers see the step.

Every file is a door.
"""
