"""Threads of this process: who goes first, who need not be waited for, what forks and Ctrl-C
must not break, waits for CPUs.

Every file is a door.
"""
