"""Tiny random checkpoints of models that read images, and what transformers generates from them."""

import functools
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from invariants import check_scheduler
from PIL import Image as Picture
from safetensors.torch import load_file, save_file
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from nanovllm import LLM, SamplingParams
from nanovllm.images.image import Image, PlacedImage

VOCAB = 128
PAD = 120  # the placeholder
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 49,
    "out_hidden_size": 64,
    "initializer_range": 0.1,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
IDS = {"image_token_id": PAD, "vision_start_token_id": 121, "vision_end_token_id": 122}
IDS |= {"video_token_id": 123}


def make_qwen3_vl(path: Path, *, seed: int = 0, **text: Any) -> Path:
    """A checkpoint of Qwen3-VL with deepstack."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope, **text},
        vision_config={**TOWER, "deepstack_visual_indexes": [0, 1]},
        **IDS,
    )
    return _save(transformers.Qwen3VLForConditionalGeneration, config, path, seed)


def make_qwen3_5(path: Path, *, seed: int = 0, **text: Any) -> Path:
    """A checkpoint of Qwen3.5, whose first layer keeps a state."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]}
    linear = {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "initializer_range": 0.15,
    }
    config = transformers.Qwen3_5Config(
        text_config={
            **TEXT,
            **linear,
            "rope_parameters": {**rope, "partial_rotary_factor": 0.5},
            **text,
        },
        vision_config=TOWER,
        **IDS,
    )
    return _save(transformers.Qwen3_5ForConditionalGeneration, config, path, seed)


def make_qwen3_vl_moe(path: Path, *, seed: int = 1) -> Path:
    """A checkpoint of Qwen3-VL with experts in one tensor, as transformers writes them."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = transformers.Qwen3VLMoeConfig(
        text_config={**TEXT, **experts, "rope_parameters": rope},
        vision_config={**TOWER, "deepstack_visual_indexes": [0, 1]},
        **IDS,
    )
    return _save(transformers.Qwen3VLMoeForConditionalGeneration, config, path, seed)


def with_inputs_first(path: Path, other: Path) -> Path:
    """The same checkpoint with experts as published files have them: [experts, inputs, outputs]."""
    shutil.copytree(path, other)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    return other


def make_gemma3(path: Path, *, seed: int = 0) -> Path:
    """A checkpoint of Gemma 3: images of 64 x 64 pixels and 16 tokens, layers that slide over a
    window that is smaller, and one that does not.
    """
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3Config(
        text_config={**TEXT, "layer_types": kinds, "sliding_window": 12},
        vision_config={
            "hidden_size": 32,
            "image_size": 64,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 8,
            "vision_use_head": False,
        },
        mm_tokens_per_image=16,
        boi_token_index=121,
        eoi_token_index=122,
        image_token_index=PAD,
        tie_word_embeddings=False,
    )
    return _save(transformers.Gemma3ForConditionalGeneration, config, path, seed)


VISION = {
    "qwen3-vl": make_qwen3_vl,
    "qwen3.5": make_qwen3_5,
    "qwen3-vl-moe": make_qwen3_vl_moe,
    "gemma3": make_gemma3,
}


class Sight(NamedTuple):
    """How models of a family see.

    Attributes:
        patch: pixels of a patch's side.
        area: pixels of a token.
        processor: processor of transformers, for pictures that need no resizing.
        type_ids: name of what tells it which tokens are of images.
    """

    patch: int
    area: int
    processor: Any
    type_ids: str


@functools.cache
def sight_of(path: Path) -> Sight:
    """How a checkpoint's model sees."""
    half: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if "Gemma3" in (path / "config.json").read_text():
        processor = Gemma3ImageProcessorPil(size={"height": 64, "width": 64}, **half)
        return Sight(8, 256, processor, "token_type_ids")
    size = {"shortest_edge": 1, "longest_edge": 1 << 20}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=16, merge_size=2, **half)
    return Sight(16, 1024, processor, "mm_token_type_ids")


def _save(kind: Any, config: Any, path: Path, seed: int) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith("bias"):
                param.data += 0.2 * torch.randn_like(param)
            if name.endswith("mm_input_projection_weight"):  # zero
                param.data.normal_()
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    sight_of(path).processor.save_pretrained(path)
    return path


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """[height, width, 3] uint8: noise over a gradient."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, 3), np.uint8)


@functools.cache
def reference_model(path: Path) -> Any:
    """The checkpoint in transformers, float32 on the CPU."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def prompt_of(path: Path, parts: list[Any]) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """A prompt of tokens and pictures: token ids with placeholders, and the images."""
    ids: list[int] = []
    images, sight = [], sight_of(path)
    for part in parts:
        if isinstance(part, np.ndarray):
            image = Image.of(part, sight.patch, part.size // 3 // sight.area)
            ids.append(121)
            images.append(PlacedImage(len(ids), image))
            ids += [PAD] * image.num_tokens + [122]
        else:
            ids += part
    return ids, tuple(images)


def given_to_generate(path: Path, parts: list[Any]) -> dict[str, Any]:
    """The same, as `generate` takes it."""
    ids, images = prompt_of(path, parts)
    prompt: dict[str, Any] = {"prompt_token_ids": ids}
    if images:
        pictures = [part for part in parts if isinstance(part, np.ndarray)]
        prompt["multi_modal_data"] = {"image": pictures}
    return prompt


def add(llm: LLM, parts: list[Any], params: SamplingParams) -> int:
    """Queue a prompt of tokens and pictures."""
    path = Path(llm.config.model)
    _, images = prompt_of(path, parts)
    checked = llm._intake.check(given_to_generate(path, parts), params)
    assert [placed.offset for placed in checked.pictures] == [placed.offset for placed in images]
    # Ready at once: steps do not depend on threads.
    return llm._add(checked._replace(images=images, pictures=()))


def run(llm: LLM, prompts: list[list[Any]], params: list[SamplingParams]) -> list[Any]:
    """The outputs of prompts that are there at once. The engine's books are right after each
    step.
    """
    ids = [add(llm, *request) for request in zip(prompts, params, strict=True)]
    found = {}
    while not llm.is_finished():
        found.update((output.request_id, output) for output in llm.step())
        check_scheduler(llm.scheduler)
    return [found[request_id] for request_id in ids]


def inputs_of(path: Path, parts: list[Any], completion: list[int]) -> dict[str, Any]:
    """What transformers' model gets for a prompt and tokens after it."""
    ids, _ = prompt_of(path, parts)
    sight = sight_of(path)
    given: dict[str, Any] = {"input_ids": torch.tensor([ids + completion])}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given[sight.type_ids] = (given["input_ids"] == PAD).int()
    pictures = [Picture.fromarray(part) for part in parts if isinstance(part, np.ndarray)]
    if pictures:
        given |= dict(sight.processor(pictures, return_tensors="pt"))
        given.pop("num_crops", None)
    return given


def reference(path: Path, parts: list[Any], max_tokens: int) -> list[int]:
    """The greedy continuation by transformers' `generate`, with the pixels of its own processor."""
    given = inputs_of(path, parts, [])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        found = reference_model(path).generate(**given, max_new_tokens=max_tokens, **options)
    return found[0, given["input_ids"].shape[1] :].tolist()


def reference_beams(
    path: Path, parts: list[Any], width: int, max_tokens: int
) -> list[tuple[list[int], float]]:
    """Sequences by transformers' beam search, and their log-probabilities, the best first."""
    given = inputs_of(path, parts, [])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "num_beams": width}
    options |= {"num_return_sequences": width, "early_stopping": "never", "length_penalty": 1.0}
    with torch.inference_mode():
        found = reference_model(path).generate(
            **given,
            **options,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_scores=True,
        )
    totals = (found.sequences_scores * max_tokens).tolist()
    return list(zip(found.sequences.tolist(), totals, strict=True))


def reference_logprobs(path: Path, parts: list[Any], completion: list[int]) -> torch.Tensor:
    """Log-probabilities by transformers of all tokens after the first one: [n - 1, V]."""
    with torch.inference_mode():
        logits = reference_model(path)(**inputs_of(path, parts, completion)).logits[0]
    return logits.log_softmax(-1)[:-1]
