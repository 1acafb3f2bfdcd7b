"""Readers of a checkpoint's files: family, sizes, rotation, formats, defaults and tokenizer.

Doors: `model_config`, a model's facts; `families`, `rope`, `quantization`, `fp8` and `int4`, parts;
`names` of tensors; `refusals`; `hub`, `files`, `tokenizer`, `generation_config`, readers of a
checkpoint's files.
"""
