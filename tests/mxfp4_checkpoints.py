"""Checkpoints of gpt-oss with experts in 4 bits, of random codes."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints import copy_checkpoint, edit_json, make_checkpoint

SEED = 7


def checkpoints(directory: Path) -> tuple[Path, Path]:
    """One with experts in 4 bits, and one with the same numbers. Its scales are in another file,
    which comes first in the alphabet.
    """
    sizes = {"intermediate_size": 96, "num_local_experts": 5, "num_experts_per_tok": 2}
    plain = make_checkpoint(directory / "plain", "gpt_oss", head_dim=16, **sizes)
    packed = copy_checkpoint(plain, directory / "packed")
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(SEED)
    blocks, scales, rest = {}, {}, dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj") and ".experts." in name:
            experts, columns, rows = tensor.shape
            shape = experts, rows, columns // 32, 16
            block = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scale = torch.randint(122, 127, shape[:3], generator=generator, dtype=torch.uint8)
            blocks[f"{name}_blocks"], scales[f"{name}_scales"] = block, scale
            tensors[name] = convert_moe_packed_tensors(block, scale, dtype=torch.float32)
            assert tensors[name].shape == tensor.shape
            del rest[name]
    assert len(blocks) == 4
    save_file({k: v.contiguous() for k, v in tensors.items()}, plain / "model.safetensors")
    (packed / "model.safetensors").unlink()
    files = {"a-scales.safetensors": scales, "b-rest.safetensors": {**rest, **blocks}}
    for file, held in files.items():
        save_file(held, packed / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    edit_json(packed / "model.safetensors.index.json", weight_map=weight_map)
    edit_json(packed / "config.json", quantization_config={"quant_method": "mxfp4"})
    return packed, plain
