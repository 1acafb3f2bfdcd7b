"""Tiny random checkpoints with all that their users have: tokenizer, chat template, processor."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from vision_checkpoints import PAD, make_gemma3, make_qwen3_vl, reference_model

from nanovllm import SamplingParams

LETTERS = [*map(chr, range(32, 127)), "\n"]  # tokens 0 to 95
SPECIAL = {PAD: "<|image_pad|>", 121: "<|vision_start|>", 122: "<|vision_end|>"}
SPECIAL |= {123: "<|video_pad|>", 124: "<|im_start|>", 125: "<|im_end|>"}
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }} \
{%- if message.content is string %}{{ message.content }}\
{%- else %}{%- for part in message.content %}\
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{%- elif part.type == 'text' %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}<|im_end|>\
{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant {%- endif %}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 40_000, "shortest_edge": 2048},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make_seeing(path: Path) -> Path:
    """A checkpoint of Qwen3-VL."""
    make_qwen3_vl(path)
    _save_tokenizer(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path


def make_seeing_gemma3(path: Path) -> Path:
    """A checkpoint of Gemma 3, whose placeholder in texts is the beginning of an image."""
    make_gemma3(path)
    _save_tokenizer(path)
    return path


def _save_tokenizer(path: Path) -> None:
    """A tokenizer for which a letter is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate(LETTERS)}
    vocab |= {f"<unused{i}>": i for i in range(len(LETTERS), PAD)}
    vocab |= {text: i for i, text in SPECIAL.items()}
    vocab |= {"<unk>": 126, "<eos>": 127}
    tokenizer = Tokenizer(models.WordLevel(vocab, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
        extra_special_tokens={  # of Gemma 3
            "image_token": SPECIAL[PAD],
            "boi_token": SPECIAL[121],
            "eoi_token": SPECIAL[122],
        },
    )
    fast.save_pretrained(path)


def photo(height: int, width: int, seed: int) -> Pillow.Image:
    """Smooth noise, as a PIL image."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return Pillow.fromarray(small).resize((width, height), Pillow.Resampling.BILINEAR)


@functools.cache
def processor(path: Path) -> Any:
    """The checkpoint's processor in transformers, on torchvision."""
    pytest.importorskip("torchvision", reason="torchvision is the reference")
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if "Gemma3" in (path / "config.json").read_text():
        half = [0.5] * 3
        images = transformers.Gemma3ImageProcessor(
            size={"height": 64, "width": 64}, image_mean=half, image_std=half
        )
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=16)
    raw = {key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**raw),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    )


def reference(path: Path, text: str, images: list[Any], max_tokens: int) -> tuple[list[int], list]:
    """Its tokens of a prompt, and the greedy continuation by transformers' `generate`."""
    given = processor(path)(text=[text], images=images or None, return_tensors="pt")
    given.pop("num_crops", None)
    count = given["input_ids"].shape[1]
    with torch.inference_mode():
        found = reference_model(path).generate(
            **given, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return found[0, :count].tolist(), found[0, count:].tolist()
