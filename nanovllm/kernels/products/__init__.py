"""Products by matrices in 16, 8 and 4 bits, of few rows and of many, and those of experts.

Every file is a door.
"""
