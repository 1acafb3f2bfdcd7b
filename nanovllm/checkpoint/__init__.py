"""Readers of a checkpoint's files: family, sizes, rotation, formats, defaults and tokenizer.

Doors: `model_config`, its facts; `families`, `rope`, `vision`, `quantization`, `modules`, `fp8`,
`int8`, `int4`, `names`, parts; `hub`, `files`, `tokenizer`, `generation_config`, readers.
"""
