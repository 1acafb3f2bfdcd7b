"""Accuracy of the settings that save bytes: log-probabilities of a text against float32.

    python benchmarks/accuracy.py [--model DIR] [--text FILE] [--device cpu]

The text is cut into pieces of --length tokens. Without one, it is 200 sums: the embedded checkpoint
is certain of their results, and of the operands it can know nothing, so all settings look alike in
the first and far apart in the second. For each setting: the mean, 99th percentile and largest error
of a token's log-probability, the perplexity, and how often the likeliest token is that of float32.
Prints a table; the last line is JSON.

Texts are computed as prompts are. Of these an FP8 cache has the same numbers as in decoding, but
the kernels of decoding are not run. INT4 here is each number rounded to the nearest code, in groups
of 128 (of fewer where layers are narrower); published checkpoints are made with more care. So is
MXFP4, in which gpt-oss has its experts. Of a checkpoint that is quantised, float32 has the numbers
that its codes mean, and settings that quantise weights are left out.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from nanovllm import LLM, TINY, SamplingParams
from nanovllm.benchmark import harness
from nanovllm.checkpoint.hub import checkpoint_directory
from nanovllm.checkpoint.int4 import GROUPS
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.cli import bench
from nanovllm.models.loader import find_weights
from nanovllm.tensors import mxfp4

REFERENCE, INT4, MXFP4 = "float32", "bfloat16, INT4 weights", "bfloat16, MXFP4 experts"
SETTINGS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "float32, FP8 KV": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "bfloat16, FP8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "bfloat16, FP8 weights": {"dtype": "bfloat16", "quantization": "fp8"},
    "bfloat16, FP8 both": {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "quantization": "fp8"},
    INT4: {"dtype": "bfloat16"},
    MXFP4: {"dtype": "bfloat16"},
}
QUANTISING = [
    INT4,
    MXFP4,
    *(name for name, options in SETTINGS.items() if "quantization" in options),
]


class Measured(NamedTuple):
    """Results for all tokens after the first of each piece.

    Attributes:
        logprobs: [n] log-probabilities of the text's tokens.
        likeliest: [n] tokens that greedy decoding would choose.
    """

    logprobs: NDArray[np.float64]
    likeliest: NDArray[np.int64]


def pieces(llm: LLM, text: str | None, length: int) -> list[list[int]]:
    """The tokens of the text, at most `length` in a piece, or of sums; each begun as a text is."""
    encode = llm.get_tokenizer().encode
    if text is None:
        rng = random.Random(0)
        pairs = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(200)]
        return [encode(f"{a}+{b}={a + b}") for a, b in pairs]
    first = encode("")  # special tokens
    ids, size = encode(text)[len(first) :], length - len(first)
    found = [[*first, *ids[begin : begin + size]] for begin in range(0, len(ids), size)]
    return [piece for piece in found if len(piece) > 1]


def measure(llm: LLM, prompts: list[list[int]]) -> Measured:
    """Score the prompts with the engine."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    logprobs, likeliest = [], []
    for output in outputs:
        assert output.prompt_logprobs is not None
        for token, entries in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            if entries is not None:  # there is none of the first
                logprobs.append(entries[token].logprob)
                likeliest.append(next(i for i, entry in entries.items() if entry.rank == 1))
    return Measured(np.array(logprobs), np.array(likeliest))


def compare(found: Measured, exact: Measured) -> dict[str, float]:
    """The figures of a setting."""
    error = np.abs(found.logprobs - exact.logprobs)
    return {
        "mean_error": float(error.mean()),
        "p99_error": float(np.quantile(error, 0.99)),
        "max_error": float(error.max()),
        "perplexity": float(np.exp(-found.logprobs.mean())),
        "greedy_agreement": float((found.likeliest == exact.likeliest).mean()),
    }


def round_to_int4(model: Path, out: Path) -> None:
    """Write a copy of a checkpoint whose projections are in 4 bits, as compressed-tensors does."""
    tensors = read_tensors(model)
    matrices = [name for name in tensors if name.endswith("_proj.weight")]
    fitting = [size for size in GROUPS if all(tensors[m].shape[1] % size == 0 for m in matrices)]
    if not (matrices and fitting):
        raise SystemExit(f"{INT4}: wants projections of multiples of 32 inputs; choose --settings")
    group = fitting[-1]
    for name in matrices:
        x, module = tensors.pop(name).float(), name.removesuffix(".weight")
        parts = x.view(len(x), -1, group)
        least, most = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((most - least) / 15).clamp(min=1e-6).half()
        zeros = (-least / scales).round().clamp(0, 15)
        codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 15).view_as(x)
        tensors[f"{module}.weight_packed"] = in_words(codes)
        tensors[f"{module}.weight_zero_point"] = in_words(zeros.T).T.contiguous()
        tensors[f"{module}.weight_scale"] = scales
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights | {"symmetric": False}}
        },
    }
    write_copy(model, out, tensors, quantization)


def round_to_mxfp4(model: Path, out: Path) -> None:
    """Write a copy of a checkpoint of gpt-oss whose experts are in 4 bits, as published ones are:
    a matrix has outputs before inputs, and two codes in a byte.
    """
    tensors = read_tensors(model)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        x = tensors.pop(name).mT  # [E, rows, columns]
        codes, exponents = mxfp4.quantize(x.flatten(0, 1))
        pairs = codes.view(*x.shape[:2], -1, mxfp4.BLOCK // 2, 2)
        tensors[f"{name}_blocks"] = pairs[..., 0] | pairs[..., 1] << 4
        tensors[f"{name}_scales"] = exponents.view(*x.shape[:2], -1)
    write_copy(model, out, tensors, {"quant_method": "mxfp4"})


def read_tensors(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for name, file in find_weights(model).items():
        with safe_open(file, framework="pt") as opened:
            tensors[name] = opened.get_tensor(name)
    return tensors


def write_copy(
    model: Path, out: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]
) -> None:
    """Write a copy of a checkpoint with other tensors and their `quantization_config`."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, out / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(config))


ROUND = {INT4: round_to_int4, MXFP4: round_to_mxfp4}


@contextmanager
def directory(setting: str, model: str) -> Iterator[str]:
    """Directory of the checkpoint for a setting."""
    if setting not in ROUND:
        yield model
        return
    with tempfile.TemporaryDirectory() as scratch:
        ROUND[setting](Path(model), Path(scratch, "rounded"))
        yield str(Path(scratch, "rounded"))


def fits(setting: str, config: ModelConfig) -> bool:
    """Whether a model can have a setting: quantised weights stay as they are, gpt-oss has MXFP4
    alone, and INT4 is of matrices that checkpoints do not stack.
    """
    if setting not in QUANTISING:
        return True
    if config.quantization is not None:
        return False
    if config.architecture == "GptOssForCausalLM":
        return setting == MXFP4
    is_stacked = config.experts is not None and config.experts.packed
    return setting != MXFP4 and not (setting == INT4 and is_stacked)


def in_words(codes: torch.Tensor) -> torch.Tensor:
    """Eight neighbours of a row in an int32."""
    shifts = 4 * torch.arange(8)
    return (codes.long().view(len(codes), -1, 8) << shifts).sum(2).to(torch.int32)


def main() -> None:
    """Measure every setting and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=TINY, help="checkpoint: directory, or name on the hub")
    parser.add_argument(
        "--text", type=argparse.FileType(encoding="utf-8"), help="file; without one: sums"
    )
    parser.add_argument("--length", type=bench.positive, default=1000, help="of a piece (1000)")
    parser.add_argument("--device", default="auto", help="cuda, cuda:N, cpu or auto")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), help="(all that fit)")
    parser.add_argument("--save", metavar="FILE", help="append the result, as a line of JSON")
    args = parser.parse_args()
    text = None if args.text is None else args.text.read()
    results: dict[str, dict[str, float]] = {}
    exact: Measured | None = None
    try:
        model = checkpoint_directory(args.model, None)
        config = ModelConfig.from_pretrained(model)
    except ValueError as error:
        parser.error(str(error))
    fitting = [name for name in SETTINGS if fits(name, config)]
    asked = args.settings or fitting
    if wrong := [name for name in asked if name not in fitting]:
        why = "are quantised" if config.quantization else "have another layout"
        parser.error(f"--settings: {wrong[0]!r}: the weights {why}: leave it out")
    wanted = [name for name in fitting if name in {REFERENCE, *asked}]
    print(f"{'setting':23s} mean error  99 %     largest  perplexity  likeliest token equal")
    for name in wanted:
        with (
            directory(name, model) as checkpoint,
            LLM(checkpoint, device=args.device, **SETTINGS[name]) as llm,
        ):
            prompts = pieces(llm, text, min(args.length, llm.max_model_len - 1))
            if not prompts:
                parser.error("the text, or --length, has not two tokens")
            found = measure(llm, prompts)
            conditions = harness.conditions(llm)
        exact = exact or found
        row = results[name] = compare(found, exact)
        print(
            f"{name:23s} {row['mean_error']:<11.2g} {row['p99_error']:<8.2g} "
            f"{row['max_error']:<8.2g} {row['perplexity']:<11.4f} {row['greedy_agreement']:.2%}",
            flush=True,
        )
    result = {
        "benchmark": "accuracy",
        "model": args.model,
        "text": "sums" if args.text is None else args.text.name,
        "length": args.length,
        "tokens": len(found.logprobs),
        "results": results,
        **conditions,
    }
    harness.publish(result, args.save)


if __name__ == "__main__":
    main()
