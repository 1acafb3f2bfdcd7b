"""Kernels and layers alone, and a step kernel by kernel; each file is a script for a GPU."""
