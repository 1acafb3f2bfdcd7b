"""The model architectures, one file each, and the loader that fills them."""
