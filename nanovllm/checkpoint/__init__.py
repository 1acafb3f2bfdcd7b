"""Readers of a checkpoint's files: family, sizes, rotation, formats, defaults and tokenizer.

Doors: `model_config`, a model's facts; `families`, `rope`, `quantization`, `fp8` and `int4`, parts of
it; `refusals`; `hub`, `files`, `tokenizer` and `generation_config`, of what lies beside them.
"""
