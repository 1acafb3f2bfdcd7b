"""Readers of a checkpoint's files: family, sizes, rotation, formats, defaults and tokenizer.

Doors: `model_config`, the facts of a model; `families`, `rope` and `quantization`, its parts, with
the formats `fp8` and `int4`; `refusals`; `hub`, `files`, `tokenizer` and `generation_config`, which
read what lies beside them.
"""
