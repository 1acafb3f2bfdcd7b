"""The command line: `nanovllm COMMAND`, one file for each command.

Door: `main`.
"""
