"""Benchmarks beside bench.py; each file is a script."""
