"""Readers of a checkpoint's files: family, sizes, rotation, formats, defaults and tokenizer.

Doors: `model_config`, the facts of a model; `families`, `rope` and `quantization`, its parts;
`refusals`; `hub`, `files`, `tokenizer` and `generation_config`, which read what lies beside them.
"""
