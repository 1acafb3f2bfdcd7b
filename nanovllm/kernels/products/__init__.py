"""Products by matrices in 16, 8 and 4 bits, for few rows and for many, and by experts.

Every file is a door.
"""
