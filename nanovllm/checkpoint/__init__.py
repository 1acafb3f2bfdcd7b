"""Readers of a checkpoint's files: family, sizes, rotation, formats, defaults and tokenizer.

Doors: `model_config`, a model's facts; `families`, `rope`, `quantization`, `fp8`, `int8`, `int4`,
parts; `refusals`; `hub`, `files`, `tokenizer`, `generation_config`, readers of single files.
"""
