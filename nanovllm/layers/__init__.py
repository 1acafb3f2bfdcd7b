"""The layers that models are made of, and `Build`, by which they choose their kernels."""
