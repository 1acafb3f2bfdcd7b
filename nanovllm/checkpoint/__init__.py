"""Readers of a checkpoint's files: family, sizes, rotation, formats, defaults and tokenizer.

Doors: `model_config`, a model's facts; `families`, `rope`, `quantization`, `modules`, `fp8`,
`int4`, parts; `hub`, `files`, `tokenizer`, `generation_config`, readers of a checkpoint's files.
"""
