"""PEFT's LoRA adapters, merged into the tensors of a checkpoint while these are read.

Doors: `given`, what users pass; `directory` finds one; `adapter`, its configuration and tensors;
`merge`, the merged tensors.
"""
