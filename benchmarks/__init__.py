"""Benchmarks of whole engines, beside bench.py, and in kernels/ of parts; each file is a script."""
