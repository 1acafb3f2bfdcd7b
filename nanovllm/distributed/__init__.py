"""Collectives and shared memory of the ranks of a model that is split over devices."""
