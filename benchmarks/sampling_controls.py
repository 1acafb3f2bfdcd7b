"""Cost of the sampling controls: decode throughput with each, and without any.

    python benchmarks/sampling_controls.py --dummy qwen3-0.6b [--num-seqs 256] [--repeat 3]
        [--only CONTROL ...]

All sequences decode together: prompts of 512 random tokens, 128 new tokens each. "one" has top_k
and top_p on a single sequence. "guided JSON" needs llguidance; random weights get a tokenizer
of as many short words as the vocabulary has room for. Prints median and range of decode tokens per
second and the median's distance from that without controls; the last line is JSON, which
--save FILE appends.
"""

import argparse
import importlib.util
import itertools
import random
import statistics
import string
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.workloads import many
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.benchmark import harness
from nanovllm.benchmark.shapes import SHAPES
from nanovllm.cli import bench

PROMPT, OUTPUT = 512, 128
CONTROLS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k=50, top_p=0.9": {"top_k": 50, "top_p": 0.9},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "min_p=0.1": {"min_p": 0.1},
    "penalties": {
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5
    },
    "logprobs=0": {"logprobs": 0},
    "logprobs=0, at temperature": {"logprobs": 0, "logprobs_mode": "temperature_logprobs"},
    "logprobs=0, processed": {
        "logprobs": 0, "logprobs_mode": "processed_logprobs", "top_k": 50
    },
    "logprobs=5": {"logprobs": 5},
    "sampling mask": {"return_sampling_mask": True, "top_k": 50},
    "labels": {"logprob_token_ids": [3, 4]},
    "logit_bias": {"logit_bias": {7: 2.0, 11: -3.0}},
    "all of these": {
        "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "logprobs": 5, "logit_bias": {7: 2.0},
    },
}  # fmt: skip


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["name", "age", "tags"],
}


def write_tokenizer(directory: str, shape: dict[str, Any]) -> None:
    """A byte-level tokenizer: the bytes, short words, and an end-of-sequence token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    words = ("".join(word) for n in (2, 3, 4) for word in itertools.product(letters, repeat=n))
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += itertools.islice(words, shape["vocab_size"] - len(tokens) - 1)
    tokens.insert(shape["eos_token_id"], "<end>")
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(
        directory
    )


def measure(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Decode tokens per second of a run."""
    llm.reset_prefix_cache()
    before = llm.metrics()
    llm.generate(prompts, params, use_tqdm=False)
    after = llm.metrics()
    names = "num_decode_tokens", "decode_seconds"
    tokens, seconds = (after[name] - before[name] for name in names)
    return tokens / seconds


def main() -> None:
    """Measure each control."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    bench.add_options(parser, dummy="qwen3-0.6b")
    parser.add_argument("--num-seqs", type=bench.positive, default=256, help="sequences (256)")
    parser.add_argument("--repeat", type=bench.positive, default=3, help="timed runs (3)")
    names = [*CONTROLS, "one", "guided JSON"]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="CONTROL", help="controls (all)"
    )
    args = parser.parse_args()
    with bench.checkpoint(args) as (directory, options):
        if options.get("load_format") == "dummy":  # a directory of our own, never the user's
            write_tokenizer(directory, SHAPES[args.dummy])
        # Prompts first and alone: the measured steps decode all sequences.
        llm = LLM(directory, **{**options, "mixed_steps": False})
    vocab_size = llm.model_config.vocab_size
    prompts = many(random.Random(0), args.num_seqs, PROMPT)
    prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    common: dict[str, Any] = {"temperature": 0.6, "ignore_eos": True, "max_tokens": OUTPUT}
    plain = SamplingParams(**common)
    cases = {name: [SamplingParams(**common, **c)] * args.num_seqs for name, c in CONTROLS.items()}
    cases["one"] = [cases["top_k=50, top_p=0.9"][0], *[plain] * (args.num_seqs - 1)]
    if importlib.util.find_spec("llguidance"):
        form = StructuredOutputsParams(json=SCHEMA)
        guided = SamplingParams(**common, structured_outputs=form)
        cases["guided JSON"] = [guided] * args.num_seqs
    cases = {name: case for name, case in cases.items() if name in ("none", *args.only)}
    runs: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(args.repeat + 1):  # in turns, so that a drift of the machine hits all
        for name, params in cases.items():
            rate = measure(llm, prompts, params)
            if turn:  # the first compiles
                runs[name].append(rate)
    base, results = statistics.median(runs["none"]), {}
    for name, rates in runs.items():
        median = statistics.median(rates)
        cost = base / median - 1
        print(
            f"{name:26s} {median:8.0f} tok/s  ({min(rates):.0f}-{max(rates):.0f})  "
            f"{100 * cost:+5.1f} % of time",
            flush=True,
        )
        results[name] = {"median": median, "runs": sorted(rates), "unit": "tok/s", "cost": cost}
    result = {"benchmark": "sampling_controls", "model": bench.model_name(args), "results": results}
    result |= harness.conditions(llm)
    llm.exit()
    harness.publish(result, args.save)


if __name__ == "__main__":
    main()
