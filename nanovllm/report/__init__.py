"""A trace as a page: read it, sum it up, say what held the run back, draw it. Imports no torch."""
