"""Threads of this process: their turns, daemons that nobody waits for, their safety from forks and
Ctrl-C, their waits for CPUs.

Every file is a door.
"""
