"""Make a tiny Qwen3-VL with random weights, and a folder of pictures, to try images with:

    python scripts/make_tiny_vision.py   # tiny-vision and tiny-pictures, in the working directory

Its answers mean nothing. It has the tokenizer of the package's small checkpoint, a byte a token.
Folders that exist are left alone. Needs Pillow.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm import TINY

TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}\
{%- else %}{%- for part in message.content %}\
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 1 << 16, "shortest_edge": 1 << 12},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)


def make_model(directory: Path) -> None:
    """Save the checkpoint."""
    import torch
    from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    ids: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("vision_start", SPECIAL[2]),
            ("vision_end", SPECIAL[3]),
            ("image", SPECIAL[4]),
            ("video", SPECIAL[5]),
        )
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
        **ids,
    )
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2), "utf-8")


def make_pictures(directory: Path, count: int = 12) -> None:
    """Save pictures of several sizes and kinds, and a file that breaks off."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(count):
        width, height = 200 + 40 * i, 360 - 20 * i
        blots = rng.integers(0, 256, (4, 6, 3), np.uint8)
        image = Image.fromarray(blots).resize((width, height), Image.Resampling.BICUBIC)
        image.save(directory / f"{i:02}.{('jpg', 'png', 'webp')[i % 3]}")
    whole = (directory / "01.png").read_bytes()
    (directory / "torn.png").write_bytes(whole[: len(whole) // 2])


def main() -> None:
    """Make both, in new folders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="tiny-vision", help="(tiny-vision)")
    parser.add_argument("--pictures", default="tiny-pictures", help="(tiny-pictures)")
    args = parser.parse_args()
    if importlib.util.find_spec("PIL") is None:
        parser.exit(1, 'this script needs Pillow: pip install "pillow>=10"\n')
    wanted = {"--model": (args.model, make_model), "--pictures": (args.pictures, make_pictures)}
    for option, (name, _) in wanted.items():
        if Path(name).exists():
            parser.exit(1, f"{name} is there already: remove it, or name another by {option}\n")
    for name, make in wanted.values():
        Path(name).mkdir(parents=True)
        make(Path(name))


if __name__ == "__main__":
    main()
