"""Threads of this process: who goes first, what forks and Ctrl-C must not break, waits for CPUs.

Every file is a door.
"""
