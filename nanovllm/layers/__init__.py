"""The layers of models, and `Build`, the options by which they choose their kernels.

Every file is a door.
"""
