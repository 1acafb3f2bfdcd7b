"""What the files of a checkpoint say: its family, sizes, rotation, formats, defaults and tokenizer.

Doors: `ModelConfig.from_pretrained`, `find_model` and `load_tokenizer`.
"""
