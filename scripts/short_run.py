"""A short run through every kernel on a GPU, to be watched by compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python scripts/short_run.py

Without PyTorch's caching each tensor is an allocation of its own, so that a read or write beyond
its end is found; that rules out CUDA graphs, which replay the same kernels.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, SamplingParams
from nanovllm.benchmark.shapes import DUMMY_QUANTIZATIONS, SHAPES

LAYERS = 2
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "small-blocks": {"kvcache_block_size": 16},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "awq": {"kvcache_block_size": 16},
}


def main() -> None:
    """Prompts of many lengths, chunked, mixed with decodes, greedy and not; 160 and 192 tokens
    alone, which take tiles of 128 and more rows; several prompts that begin alike.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=FORMATS, help="all by default"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    rng = random.Random(0)
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(1, 700))] for _ in range(40)]
    params = [
        SamplingParams(temperature=i % 3 / 2, max_tokens=rng.randint(1, 40), ignore_eos=True)
        for i in range(len(prompts))
    ]
    begin = max(prompts, key=len)
    for name in args.formats:
        config = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": LAYERS}
        if name in DUMMY_QUANTIZATIONS:
            config["quantization_config"] = DUMMY_QUANTIZATIONS[name]
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            with LLM(
                directory,
                load_format="dummy",
                enforce_eager=True,
                attention_backend="triton",
                kv_cache_memory_bytes=2**28,
                max_num_batched_tokens=2048,
                **FORMATS[name],
            ) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                for length in (160, 192):
                    outputs += llm.generate([begin[:length]], params[:1], use_tqdm=False)
                alike = [begin[:512] + prompt[:9] for prompt in prompts[:8]]
                outputs += llm.generate(alike, params[:8], use_tqdm=False)
            print(name, sum(len(output.outputs[0].token_ids) for output in outputs), "tokens")


if __name__ == "__main__":
    main()
