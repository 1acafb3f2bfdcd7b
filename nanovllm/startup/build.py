"""Options resolved to what this device runs: dtypes, weight format, attention backend, kernels."""

import logging
from pathlib import Path

import torch

from nanovllm.attention import select_backend
from nanovllm.attention.base import AttentionNeeds
from nanovllm.attention.triton_backend import HEAD_DIMS
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import choose as choose_quantization
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine import scheduler
from nanovllm.images.processor import ImageProcessor, read_processor
from nanovllm.layers.base import Build
from nanovllm.tensors.fp8 import FP8
from nanovllm.utils.device import fp8_refusal, triton_refusal

logger = logging.getLogger(__name__)

DELTA_SIZES = (16, 32, 64, 128, 256)  # of heads of Gated DeltaNet


def choose_build(
    config: Config, model_config: ModelConfig, group: Group, device: torch.device
) -> tuple[Build, str]:
    """The values that layers are built with, and the reason for the attention backend.

    Args:
        config: the engine's options.
        model_config: the checkpoint's facts.
        group: the ranks that the model is split over.
        device: torch.device of this rank.

    Raises:
        ValueError: for an option that the device or the checkpoint does not allow.
    """
    on_cpu = device.type == "cpu"
    name = config.dtype
    if name == "auto":
        name = "float32" if on_cpu else model_config.dtype
    dtype: torch.dtype = getattr(torch, name)
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else FP8
    if cache_dtype == FP8 and (refusal := fp8_refusal(device)):
        raise ValueError(f"`kv_cache_dtype` {config.kv_cache_dtype!r} {refusal}")
    needs = AttentionNeeds(
        device=device,
        dtype=dtype,
        head_dim=model_config.head_dim,
        block_size=config.kvcache_block_size,
        softcap=model_config.attn_logit_softcapping > 0,
        sinks=model_config.attention_sinks,
        fp8=cache_dtype == FP8,
        batch_invariant=config.batch_invariant,
    )
    backend, reason = select_backend(config.attention_backend, needs)
    max_model_len = config.longest(model_config.max_position_embeddings)
    _warn_of_stretched_rope(model_config, max_model_len)
    can_fuse = not on_cpu and triton_refusal(device) is None
    fused = config.fused_kernels and can_fuse and _have_kernels(model_config)
    if config.batch_invariant:
        fused = fused and backend.name == "triton"
        _refuse_split_norms(model_config, group, fused)
        if not fused:
            _log_one_by_one(config, device, backend.name)
    found, experts = model_config.quantization, model_config.experts
    build = Build(
        dtype=dtype,
        fused=fused,
        group=group,
        backend=backend,
        max_model_len=max_model_len,
        block_size=config.kvcache_block_size,
        cache_dtype=cache_dtype,
        quantization=choose_quantization(
            config.quantization, found, experts is not None and experts.packed and experts.bias
        ),
        decode_tokens=scheduler.DECODE_TOKENS,
        batch_invariant=config.batch_invariant,
    )
    return build, reason


def _log_one_by_one(config: Config, device: torch.device, backend: str) -> None:
    """Say that tokens are computed one by one, and why not by kernels that compute them alike."""
    reason = "our kernels have no heads of this model's sizes"
    if device.type == "cpu":
        reason = "always on a CPU"
    elif (refusal := triton_refusal(device)) is not None:
        reason = f"Triton {refusal}"
    elif not config.fused_kernels:
        reason = "fused_kernels is off"
    elif backend != "triton":
        reason = f"attention is by {backend}"
    logger.info(
        "batch_invariant: each token is a step of its own, and a batch gains nothing (%s)", reason
    )


def _have_kernels(model_config: ModelConfig) -> bool:
    """Whether our kernels take heads of these sizes."""
    net = model_config.delta_net
    sizes = () if net is None else (net.key_head_dim, net.value_head_dim)
    fit = all(size in DELTA_SIZES for size in sizes)
    return fit and model_config.head_dim in HEAD_DIMS


def _refuse_split_norms(model_config: ModelConfig, group: Group, fused: bool) -> None:
    """Refuse norms whose rows are divided over GPUs: PyTorch sums these in an order that depends on
    their number.
    """
    if fused and group.size > 1 and model_config.qk_norm == "whole":
        raise ValueError(
            "`batch_invariant` does not support this model's norms over the heads of several GPUs, "
            f"got tensor_parallel_size {group.size}: use 1, or fused_kernels=False"
        )


def read_image_processor(config: Config, model_config: ModelConfig) -> ImageProcessor:
    """The processor of a model that reads images, with the limits of the options.

    Raises:
        ValueError: if the checkpoint's processor is not supported, is not for the tower that
            config.json describes, or `mm_processor_kwargs` is not right for it.
    """
    vision, source = model_config.vision, model_config.source
    directory = Path(config.model)
    assert vision is not None, "the model reads no images"
    tokens = source.get("mm_tokens_per_image", 0)
    processor = read_processor(directory, source["vision_config"], tokens)
    sizes = {"patch_size": (processor.patch_size, vision.patch_size)}
    if processor.merge:
        sizes["merge_size"] = processor.merge, vision.merge
        sizes["temporal_patch_size"] = processor.frames, vision.temporal_patch_size
    for name, (found, wanted) in sizes.items():
        if found != wanted:
            raise ValueError(
                f"{directory}: `{name}` of the image processor must be that of `vision_config` in "
                f"config.json, {wanted}, got {found}"
            )
    return processor.with_limits(config.mm_processor_kwargs, "mm_processor_kwargs")


def _warn_of_stretched_rope(model_config: ModelConfig, max_model_len: int) -> None:
    """Say so where short texts are not computed as in transformers."""
    for rope in model_config.ropes:
        if rope.is_stretched(max_model_len):
            logger.warning(
                "RoPE scaling %r depends on max_model_len (%d), not on the length of each text: "
                "for texts of up to %d tokens, transformers computes different logits; pass "
                "max_model_len=%d if all texts are that short",
                rope.rope_type,
                max_model_len,
                rope.original_max_position_embeddings,
                rope.original_max_position_embeddings,
            )
