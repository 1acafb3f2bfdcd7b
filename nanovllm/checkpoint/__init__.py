"""Readers of a checkpoint's files: family, sizes, rotation, formats, defaults and tokenizer.

Doors: `ModelConfig.from_pretrained`, `checkpoint_directory`, `read_sampling_params` and
`load_tokenizer`.
"""
