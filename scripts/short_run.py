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

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, SamplingParams
from nanovllm.benchmark.shapes import SHAPES

LAYERS = 2


def main() -> None:
    """Prompts of many lengths, chunked, mixed with decodes, greedy and not; one alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, PyTorch sees none")
    rng = random.Random(0)
    config = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": LAYERS}
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(1, 700))] for _ in range(40)]
    params = [
        SamplingParams(temperature=i % 3 / 2, max_tokens=rng.randint(1, 40), ignore_eos=True)
        for i in range(len(prompts))
    ]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        for block_size in (16, 256):
            with LLM(
                directory,
                load_format="dummy",
                enforce_eager=True,
                attention_backend="triton",
                kvcache_block_size=block_size,
                kv_cache_memory_bytes=2**28,
                max_num_batched_tokens=1024,
            ) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                outputs += llm.generate(prompts[:1], params[:1], use_tqdm=False)
            print(block_size, sum(len(output.outputs[0].token_ids) for output in outputs), "tokens")


if __name__ == "__main__":
    main()
