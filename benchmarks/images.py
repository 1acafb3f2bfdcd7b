"""Prompts with images: images per second, and what bounds them.

    python benchmarks/images.py --shape qwen3-vl-2b --images 1000x640x480 200x1920x1080

Random weights in a published shape; photographs that do not exist (smooth noise, as JPEG files in
memory), no two alike. Each set of images runs after a warm-up of a tenth of it. Of each the script
prints images per second; the share of time in which kernels run on the GPU, by a profile of the
set, which runs once more with other images; the time that the GPU takes for an image; and how many
images a second threads prepare without an engine. The last line is JSON.

    python benchmarks/images.py --shape qwen3-vl-2b --images --memory 5000x640x480

does a job over so many files, and prints the memory of the process, and of the GPU, after a tenth
of them and at the end.
"""

import argparse
import io
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.batch import run
from nanovllm.benchmark import harness
from nanovllm.images.picture import PlacedPicture
from nanovllm.images.preparation import Preparation, default_threads

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
NOT_KERNELS = "Memcpy", "Memset"  # beginnings of names of what the GPU does beside kernels
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


def photographs(images: Images, first: int) -> list[bytes]:
    """JPEG files, made by threads; `first` is the seed of the first, and others' follow."""

    def make(seed: int) -> bytes:
        small = images.height // 8, images.width // 8, 3
        noise = Image.fromarray(np.random.default_rng(seed).integers(0, 256, small, np.uint8))
        file = io.BytesIO()
        noise.resize((images.width, images.height), Image.Resampling.BICUBIC).save(file, "JPEG")
        return file.getvalue()

    with ThreadPoolExecutor(default_threads()) as threads:
        return [*threads.map(make, range(first, first + images.number))]


def prompt_of(file: Any, rng: random.Random) -> dict[str, Any]:
    """A prompt with an image between a few random tokens."""
    before, after = ([rng.randrange(10_000) for _ in range(n)] for n in (8, 24))
    ids = [*before, START, PAD, END, *after]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": file}}


def prompts_of(files: list[Any], rng: random.Random) -> list[dict[str, Any]]:
    """A prompt with each image."""
    return [prompt_of(file, rng) for file in files]


def union(spans: list[tuple[int, int]]) -> int:
    """The length of what spans cover together, each from a begin to an end."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def busy_share(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams) -> float:
    """The share of a run's time in which at least one kernel runs on the GPU; copies are none.
    Nothing is assumed of what lies between two kernels of a step. The profiler takes time on the
    host, so the share is rather too small.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    spans = [
        (event.start_ns(), event.end_ns())
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation()
        and not event.name().startswith(NOT_KERNELS)
    ]
    return union(spans) / 1e9 / seconds


def preparation_alone(llm: LLM, prompts: list[dict[str, Any]]) -> float:
    """Images per second that the threads of an engine prepare without it."""
    images = llm.image_prompts
    preparation = Preparation(images.processor)  # type: ignore[union-attr]
    left = len(prompts)
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        [sized] = images.open(prompt["multi_modal_data"], None, "prompt")
        preparation.add(i, (PlacedPicture(0, sized),))
    while left:
        ready = preparation.take_ready()
        assert not any(each.error for each in ready)
        preparation.release([each.request_id for each in ready])
        left -= len(ready)
        if not ready:
            preparation.wait(1)
    seconds = time.perf_counter() - start
    preparation.close()
    return len(prompts) / seconds


def measure(llm: LLM, images: Images, args: argparse.Namespace) -> dict[str, Any]:
    """One set of images."""
    rng, seed = random.Random(args.seed), args.seed << 32
    # The profiler sees this process alone.
    on_gpu = llm.metrics()["device"] != "cpu" and llm.config.data_parallel_size == 1
    num_warm = max(1, images.number // 10)
    num_profiled = images.number if on_gpu else 0
    more = images._replace(number=images.number + num_warm + num_profiled)
    all_prompts = prompts_of(photographs(more, seed), rng)
    prompts, rest = all_prompts[: images.number], all_prompts[images.number :]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=args.tokens)
    llm.generate(rest[:num_warm], params, use_tqdm=False)
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
    in_steps = sum(step["gpu_us"] or 0 for step in steps) / 1e6
    encoding = sum(step.get("encode_us", 0) for step in steps) / 1e6
    preparing = sum(event["dur"] for event in events if event["name"] == "prepare") / 1e6
    return {
        "images": images.number,
        "size": f"{images.width} x {images.height}",
        "seconds": seconds,
        "images_per_second": images.number / seconds,
        "gpu_busy": busy_share(llm, rest[num_warm:], params) if on_gpu else 0,
        "gpu_in_steps": in_steps / seconds,
        "encode_ms_per_image": 1e3 * encoding / images.number,
        "prepare_ms_per_image": 1e3 * preparing / images.number,
        "preparation_alone": preparation_alone(llm, prompts),
        "threads": default_threads(),
        "prompt_tokens_per_image": len(outputs[0].prompt_token_ids),
    }


def measure_memory(llm: LLM, images: Images, args: argparse.Namespace) -> dict[str, Any]:
    """Memory over a job whose files are read as it comes to them, in MiB."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=args.tokens)
    rng, seed = random.Random(args.seed), (args.seed << 32) + (1 << 31)
    on_gpu = llm.metrics()["device"] != "cpu"
    found: dict[str, Any] = {"images": images.number, "size": f"{images.width} x {images.height}"}
    with tempfile.TemporaryDirectory() as directory:
        paths: list[Path] = []
        part = 500
        for first in range(0, images.number, part):
            some = images._replace(number=min(part, images.number - first))
            for file in photographs(some, seed + first):
                paths.append(Path(directory) / f"{len(paths)}.jpg")
                paths[-1].write_bytes(file)
        rows = ({**prompt_of(str(path), rng), "prompt": None} for path in paths)
        start, most = time.perf_counter(), 0.0
        for i, result in enumerate(run(llm, rows, params), 1):
            assert result.error is None, result.error
            most = max(most, resident())
            if i == max(1, images.number // 10):
                found |= {"resident_after_a_tenth": resident()}
                if on_gpu:
                    found |= {"reserved_after_a_tenth": torch.cuda.memory_reserved() / 2**20}
        found |= {"seconds": time.perf_counter() - start, "resident_at_most": most}
        if on_gpu:
            found["reserved_at_most"] = torch.cuda.max_memory_reserved() / 2**20
    return found


def resident() -> float:
    """Memory of this process, in MiB, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-vl-2b", help="published shape")
    parser.add_argument(
        "--images",
        nargs="*",
        type=Images.parse,
        default=[Images(1000, 640, 480), Images(200, 1920, 1080)],
        help="COUNTxWIDTHxHEIGHT, of each set",
    )
    parser.add_argument(
        "--memory", type=Images.parse, help="COUNTxWIDTHxHEIGHT of a job whose memory is measured"
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
                f"{found['images_per_second']:.1f} images/s, kernels run "
                f"{found['gpu_busy']:.0%} of the time (steps {found['gpu_in_steps']:.0%}); an "
                f"image takes {found['encode_ms_per_image']:.1f} ms to encode and "
                f"{found['prepare_ms_per_image']:.1f} ms of a core to prepare; {found['threads']} "
                f"threads alone prepare {found['preparation_alone']:.0f} images/s"
            )
        result = {"shape": args.shape, "tokens": args.tokens, "results": results}
        if args.memory is not None:
            result["memory"] = memory = measure_memory(llm, args.memory, args)
            print(", ".join(f"{key} {value}" for key, value in memory.items()))
        harness.publish({**result, **harness.conditions(llm)}, args.output)


if __name__ == "__main__":
    main()
