"""Prompts with images: images per second, and what bounds them.

    python benchmarks/images.py --shape qwen3-vl-2b --images 1000x640x480 200x1920x1080

Random weights in a published shape; photographs that do not exist (smooth noise, as JPEG files in
memory), no two alike. Each set of images runs after a warm-up of a tenth of it. Of each the script
prints images per second, the share of time in which the GPU computes, the time that it takes for an
image, and what threads alone could prepare. The last line is JSON.
"""

import argparse
import io
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from nanovllm import LLM, SamplingParams
from nanovllm.benchmark import harness
from nanovllm.images.preparation import default_threads

TINY = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
MIDDLE = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
LARGE = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
# Of the language model: hidden size, layers, heads, intermediate size; blocks of deepstack.
SHAPES: dict[str, tuple[dict[str, int], tuple[int, int, int, int], list[int]]] = {
    "tiny": (TINY, (128, 2, 2, 192), [0]),
    "qwen3-vl-2b": (MIDDLE, (2048, 28, 16, 6144), [5, 11, 17]),
    "qwen3-vl-4b": (MIDDLE, (2560, 36, 32, 9728), [5, 11, 17]),
    "qwen3-vl-8b": (LARGE, (4096, 36, 32, 12288), [8, 16, 24]),
}
VOCAB_SIZE, PAD, START, END = 151_936, 151_655, 151_652, 151_653
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


class Images(NamedTuple):
    """A set of images: how many, and their size in pixels."""

    number: int
    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> "Images":
        """COUNTxWIDTHxHEIGHT"""
        return cls(*map(int, text.split("x")))


def config_of(shape: str) -> dict[str, Any]:
    """The config.json of a shape."""
    tower, (hidden, layers, heads, intermediate), deepstack = SHAPES[shape]
    rope = {"rope_type": "default", "rope_theta": 5_000_000, "mrope_section": [24, 20, 20]}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": PAD,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "tie_word_embeddings": shape != "qwen3-vl-8b",
        "text_config": {
            "dtype": "bfloat16",
            "eos_token_id": 151_645,
            "head_dim": 128,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "max_position_embeddings": 262_144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": min(8, heads),
            "rms_norm_eps": 1e-6,
            "rope_parameters": rope,
            "vocab_size": VOCAB_SIZE,
        },
        "vision_config": {
            **tower,
            "deepstack_visual_indexes": deepstack,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
        },
    }


@contextmanager
def checkpoint(shape: str) -> Iterator[str]:
    """A directory with all of a checkpoint but its weights and its tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        for name, value in (
            ("config.json", config_of(shape)),
            ("preprocessor_config.json", PROCESSOR),
        ):
            (Path(directory) / name).write_text(json.dumps(value))
        yield directory


def photographs(images: Images, rng: np.random.Generator) -> Iterator[bytes]:
    """JPEG files."""
    small = images.height // 8, images.width // 8, 3
    for _ in range(images.number):
        noise = Image.fromarray(rng.integers(0, 256, small, np.uint8))
        file = io.BytesIO()
        noise.resize((images.width, images.height), Image.Resampling.BICUBIC).save(file, "JPEG")
        yield file.getvalue()


def prompts_of(files: list[bytes], rng: random.Random) -> list[dict[str, Any]]:
    """A prompt with each image, between a few random tokens."""
    return [
        {
            "prompt_token_ids": [
                *(rng.randrange(10_000) for _ in range(8)),
                *(START, PAD, END),
                *(rng.randrange(10_000) for _ in range(24)),
            ],
            "multi_modal_data": {"image": file},
        }
        for file in files
    ]


def measure(llm: LLM, images: Images, args: argparse.Namespace) -> dict[str, Any]:
    """One set of images."""
    rng = np.random.default_rng(args.seed)
    prompts = prompts_of(list(photographs(images, rng)), random.Random(args.seed))
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=args.tokens)
    num_warm = max(1, images.number // 10)
    more = list(photographs(images._replace(number=num_warm), rng))
    llm.generate(prompts_of(more, random.Random()), params, use_tqdm=False)
    encoded = llm.metrics()["num_images_encoded"]
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "run.json"
        with llm.trace(trace):
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=args.progress)
            seconds = time.perf_counter() - start
        events = json.loads(trace.read_text())
    assert all(len(output["token_ids"]) == args.tokens for output in outputs)
    assert llm.metrics()["num_images_encoded"] - encoded == images.number, "each image once"
    steps = [event["args"] for event in events if event.get("cat") == "step"]
    busy = sum(step["gpu_us"] or 0 for step in steps) / 1e6
    encoding = sum(step.get("encode_us", 0) for step in steps) / 1e6
    preparing = sum(event["dur"] for event in events if event["name"] == "prepare") / 1e6
    return {
        "images": images.number,
        "size": f"{images.width} x {images.height}",
        "seconds": seconds,
        "images_per_second": images.number / seconds,
        "gpu_busy": busy / seconds,
        "encode_ms_per_image": 1e3 * encoding / images.number,
        "prepare_ms_per_image": 1e3 * preparing / images.number,
        "preparation_bound": default_threads() * images.number / preparing,
        "prompt_tokens_per_image": len(outputs[0].prompt_token_ids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-vl-2b", help="published shape")
    parser.add_argument(
        "--images",
        nargs="+",
        type=Images.parse,
        default=[Images(1000, 640, 480), Images(200, 1920, 1080)],
        help="COUNTxWIDTHxHEIGHT, of each set",
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (64)")
    parser.add_argument("--seed", type=int, default=0, help="of images and prompts")
    parser.add_argument("--options", type=json.loads, default={}, help="of LLM, as JSON")
    parser.add_argument("--progress", action="store_true", help="show a bar")
    parser.add_argument("--output", help="file that the result is appended to")
    args = parser.parse_args()
    options = {"load_format": "dummy", **args.options}
    with checkpoint(args.shape) as directory, LLM(directory, **options) as llm:
        results = []
        for images in args.images:
            results.append(found := measure(llm, images, args))
            print(
                f"{found['images']} images of {found['size']}: "
                f"{found['images_per_second']:.1f} images/s, the GPU computes "
                f"{found['gpu_busy']:.0%} of the time; an image takes "
                f"{found['encode_ms_per_image']:.1f} ms to encode and "
                f"{found['prepare_ms_per_image']:.1f} ms of a core to prepare, so "
                f"{found['preparation_bound']:.0f} images/s at most"
            )
        result = {"shape": args.shape, "tokens": args.tokens, "results": results}
        harness.publish({**result, **harness.conditions(llm)}, args.output)


if __name__ == "__main__":
    main()
