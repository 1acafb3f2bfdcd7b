"""An engine on a GPU that is not there: `python stand_in.py CARD JOBS`, JOBS being JSON.

Tensors have shapes and no content (PyTorch's `meta` device) and say that they are on a GPU. Triton
asks a driver that answers for that GPU; it compiles what the engine launches, in the variants that
the engine chooses, and nothing runs. What was compiled is left in TRITON_CACHE_DIR.

Of a GPU that our kernels do not run on, the tensors are those of the CPU: so the engine computes.
Prints, as JSON, for each job what the engine says of itself and has generated.
"""

import contextlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from nanovllm.cli.stand_in import CARDS, CPU, GPU, META, OnCard, put_in
from nanovllm.startup import builder

VOCAB = 151936
SHAPES = {  # M, I, Hq, Hkv, tied embedding
    "0.6B": (1024, 3072, 16, 8, True),
    "8B": (4096, 12288, 32, 8, False),
}
NEEDS_RESULTS = "scores", "beam search"  # kinds of work whose host looks at what is computed
CONTROLS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 0},
    {"logit_bias": {5: 1.0}},
    {"top_k": 5, "logprobs": 1},
    {"top_p": 0.9, "allowed_token_ids": [3, 4]},
    {"min_p": 0.1, "presence_penalty": 0.5, "logprobs": 5},
    {"repetition_penalty": 1.1, "allowed_token_ids": [3, 4], "logit_bias": {5: 1.0}},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"top_p": 0.5, "logprobs": 20, "logprobs_mode": "processed_logprobs"},
    {"min_p": 0.1, "logprob_token_ids": [3, 4], "return_sampling_mask": True},
]


class AtOnce:
    """Stands for `Compiler`: what is rehearsed is compiled here."""

    def __init__(self, *args: object) -> None: ...

    def rehearsal(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None: ...

    def load(self, device: torch.device) -> None: ...

    num_pending = 0

    def close(self) -> None: ...


def write_config(directory: str, shape: str, head_dim: int, architecture: str, **more: Any) -> None:
    """The config.json of a model of two layers, of which only the second has a residual."""
    M, I, Hq, Hkv, tied = SHAPES[shape]
    config = {
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": M,
        "intermediate_size": I,
        "num_hidden_layers": 2,
        "num_attention_heads": Hq,
        "num_key_value_heads": Hkv,
        "head_dim": head_dim,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
        **more,
    }
    Path(directory, "config.json").write_text(json.dumps(config))


def compile_engine(
    shape: str,
    head_dim: int,
    architecture: str = "Qwen3ForCausalLM",
    config: dict[str, Any] | None = None,
    **options: Any,
) -> str:
    """Build an engine and have it do all it can; `config`: more of config.json."""
    from nanovllm import LLM, SamplingParams

    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "num_kvcache_blocks": 4096}
    limits |= options
    longest = 3 * limits["max_num_batched_tokens"]  # else small steps are hundreds, all alike
    lengths = [min(n, longest) for n in (1, 2, 17, 40, 90, 100, 33, 64, 5, 9)]
    with tempfile.TemporaryDirectory() as directory:
        write_config(directory, shape, head_dim, architecture, **(config or {}))
        with LLM(directory, load_format="dummy", **limits) as llm:
            for own in CONTROLS:  # one sort at a time, then all
                one = SamplingParams(max_tokens=3, **own)
                llm.generate([[7] * min(40, longest)], one, use_tqdm=False)
            params = [SamplingParams(max_tokens=3 + i, **own) for i, own in enumerate(CONTROLS)]
            llm.generate([[7] * n for n in lengths], params, use_tqdm=False)
            llm.embed([[7] * min(20, longest)], pooling="mean", use_tqdm=False)
            return str(llm.metrics()["attention_backend"])


def compile_attention(
    shape: str, head_dim: int, dtype: str, block_size: int, fp8: bool = False
) -> str:
    """The kernels of attention only, for contexts of one split, and for one that is shared."""
    from nanovllm.attention import select_backend
    from nanovllm.attention.base import QKV, AttentionNeeds
    from nanovllm.tensors.fp8 import FP8
    from nanovllm.tensors.kv_cache import KVCache
    from nanovllm.tensors.scoring import Scoring
    from nanovllm.utils.context import Context, Prefixes

    _, _, Hq, Hkv, _ = SHAPES[shape]
    kind = getattr(torch, dtype)
    needs = AttentionNeeds(GPU, kind, head_dim, block_size, fp8=fp8)
    backend, _ = select_backend("auto", needs)
    cache = KVCache.empty((4096, block_size, Hkv, head_dim), FP8 if fp8 else kind, GPU)
    sinks = torch.empty(Hq, dtype=kind, device=GPU)
    scorings = [Scoring(1.0), Scoring(1.0, 64, 50.0, sinks)]
    q = torch.empty(1, Hq, head_dim, dtype=kind, device=GPU)
    tables, lens = torch.empty(2, 1, 1, dtype=torch.int32, device=GPU)
    context = Context(1, lens[0], lens[0], tables)
    prompt = Context(
        0, lens[0], lens[0], tables, lens[0], lens[0], max_seqlen_q=1, max_seqlen_k=64, num_keys=64
    )
    k = torch.empty(1, Hkv, head_dim, dtype=kind, device=GPU)
    for scoring in scorings:
        for step in (context, prompt):
            backend.attend(QKV(q, k, k), cache, step, scoring)
    shared = replace(context, prefixes=Prefixes(*[lens[0]] * 4))
    backend.attend(QKV(q, k, k), cache, shared, scorings[0])
    return backend.name


def compile_long_prompts(head_dim: int, dtype: str) -> list[str]:
    """The kernel that long prompts of 32 heads take, of steps with and without decodes before them;
    what a step's layers share afterwards.
    """
    from nanovllm.kernels.attention.prefill import FEW_QUERIES, paged_prefill
    from nanovllm.tensors.kv_cache import KVCache
    from nanovllm.tensors.scoring import Scoring

    kind, shared = getattr(torch, dtype), dict[Any, Any]()
    cache = KVCache.empty((4096, 256, 8, head_dim), kind, GPU)
    qkv = torch.empty(900, 48, head_dim, dtype=kind, device=GPU)
    for decodes, prompts, width in ((0, 1, 16), (0, 4, 5), (3, 2, 7), (16, 16, 16)):
        tables = torch.zeros(decodes + prompts, width, dtype=torch.int32, device=GPU)[decodes:]
        cu_q, cu_k = torch.zeros(2, decodes + prompts + 1, dtype=torch.int32, device=GPU)
        q, k, v = qkv[decodes:].split([32, 8, 8], 1)
        ends = cu_q[decodes:], cu_k[decodes:]
        args = q, k, v, cache, tables, *ends, FEW_QUERIES + 1, len(q), Scoring(1.0)
        paged_prefill(*args, shared=shared)
    return [*shared]


def compile_images(dtype: str) -> str:
    """The kernels of towers with heads of 64 and 72, and those of prompts in which the tokens of an
    image see each other, with a window and without.
    """
    from nanovllm.kernels.attention.prefill import attend_to_limits, paged_prefill
    from nanovllm.kernels.attention.rotate import rotate_
    from nanovllm.tensors.kv_cache import KVCache
    from nanovllm.tensors.scoring import Scoring

    kind, T = getattr(torch, dtype), 6000
    ints = torch.empty(T, dtype=torch.int32, device=GPU)
    for D in (64, 72):
        qkv = torch.empty(T, 48, D, dtype=kind, device=GPU)
        rotate_(qkv[:, :32], torch.empty(T, D, dtype=torch.float32, device=GPU))
        attend_to_limits(*qkv.chunk(3, dim=1), ints[:4], T, ints)
    for D, Hkv in ((256, 4), (128, 16)):
        cache = KVCache.empty((4096, 256, Hkv, D), kind, GPU)
        q, k, v = torch.empty(T, 4 * Hkv, D, dtype=kind, device=GPU).split([2 * Hkv, Hkv, Hkv], 1)
        for window in (0, 1024):
            for decodes in (0, 1):  # one variant, wherever the first limit lies
                paged_prefill(
                    *(q, k, v, cache, ints.view(3, -1), ints[:4], ints[:4], T, T),
                    Scoring(1.0, window),
                    limits=ints[decodes:],
                )
    return "triton"


def compile_gated_products(dtype: str) -> None:
    """Compile an MLP's gated products, for few rows and for many."""
    from nanovllm.kernels.products.gated import MANY, takes_hopper_kernel
    from nanovllm.kernels.products.hopper_gated import hopper_gated
    from nanovllm.tensors.fp8 import FP8, Codes

    kind, K = getattr(torch, dtype), 1024

    def matrix(rows: int) -> Any:
        numbers = torch.empty(rows, K, dtype=kind, device=GPU)
        scales = torch.empty(rows, 1, device=GPU)
        return Codes(numbers, scales, (1, K)) if kind == FP8 else numbers

    weight, half = matrix(512), torch.bfloat16 if kind == FP8 else kind
    for rows in (MANY + 1, 16384):
        assert takes_hopper_kernel(rows, weight, half, None)
        hopper_gated(matrix(rows), weight, half, False)


def compile_int4_products(dtype: str, count: int) -> None:
    """Compile the first `count` of some products by weights in INT4."""
    from nanovllm.kernels.products.hopper_int4 import hopper_int4
    from nanovllm.kernels.products.tiles import Tiles
    from nanovllm.tensors.int4 import Int4Codes

    kind, N, K = getattr(torch, dtype), 512, 1024
    data = torch.empty(N, K // 4, dtype=torch.int16, device=GPU)
    scales = torch.empty(K // 128, N, 2, dtype=kind, device=GPU)
    weight = Int4Codes(data, scales, 128)
    ways = [((block_t, 256, 256, 1), False) for block_t in (128, 64)]
    ways += [((*size, 256, S), None) for *size, S in ((16, 128, 1), (128, 128, 4), (128, 256, 1))]
    for rows in (70, 1000):
        x = torch.empty(rows, K, dtype=kind, device=GPU)
        for tiles, gelu in ways[:count]:
            hopper_int4(x, weight, None, gelu, tiles=Tiles(*tiles))


def compile_packed_experts(dtype: str) -> None:
    """Compile the products of experts in 4 bits, for one token and for many."""
    from nanovllm.kernels.experts.gated_experts import gated_experts, takes_hopper_kernel
    from nanovllm.kernels.experts.weights import ExpertWeights
    from nanovllm.tensors.int4 import Int4Codes
    from nanovllm.tensors.mxfp4 import Mxfp4Codes

    kind, E, I, k = getattr(torch, dtype), 32, 512, 4

    def empty(*size: int, dtype: torch.dtype = kind) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=GPU)

    def in_mxfp4(N: int, K: int) -> Any:
        data = empty(-(-K // 128), N, 32, dtype=torch.int16)
        return Mxfp4Codes(data, empty(len(data), N, 4, dtype=torch.uint8), K)

    def in_int4(N: int, K: int) -> Any:
        return Int4Codes(empty(N, K // 4, dtype=torch.int16), empty(K // 128, N, 2), 128)

    for make in (in_mxfp4, in_int4) if kind == torch.bfloat16 else (in_int4,):
        M = 832 if make is in_mxfp4 else 896  # of whose last stage there is a part
        biases = empty(E, 2 * I), empty(E, M)
        weights = ExpertWeights(make(E * 2 * I, M), make(E * M, I), *biases, limit=7.0)
        for rows in (1, 400, 2000) if make is in_mxfp4 else (1, 160, 400, 2000):
            x = empty(rows, M)
            assert takes_hopper_kernel(x, weights, k)
            chosen = empty(rows, k, dtype=torch.int32)
            gated_experts(x, weights, chosen, empty(rows, k, dtype=torch.float32))


def compile_delta_net(dtype: str, K: int, V: int) -> str:
    """The kernels of Gated DeltaNet, for one sequence and for many."""
    from nanovllm.kernels.recurrent.delta_decode import decode
    from nanovllm.kernels.recurrent.delta_prompt import chunks_of, prompts
    from nanovllm.tensors.delta_net import DeltaNet, DeltaState

    kind, wide = getattr(torch, dtype), torch.float32

    def empty(*shape: int, dtype: torch.dtype = kind) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=GPU)

    Hk, Hv = 16, 32
    C = 2 * Hk * K + Hv * V
    layer = DeltaNet(empty(C, 4), *empty(2, Hv, dtype=wide), empty(V, dtype=wide), 1e-6, Hk)
    state = DeltaState(empty(300, 3, C), empty(300, Hv, V, K, dtype=wide))
    ints = empty(300, dtype=torch.int32)
    for T, P in ((1, 1), (256, 256)):
        mixed, ba, ends = empty(T, C + Hv * V), empty(T, 2 * Hv), ints[: P + 1]
        decode(mixed, ba, layer, state, ints[:T], ints[:T])
        prompts(mixed, ba, layer, state, ints[:P], ends, ends, chunks_of(ends, T))
    return "triton"


def count_kernels(
    shape: str,
    num_layers: int,
    num_seqs: int,
    kinds: list[str] | None,
    quantization_config: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The kernels that an engine needs for its start, those that it rehearses beside, and those
    that kinds of work need and that were not rehearsed. Nothing is compiled.
    """
    from benchmarks.first_use import KINDS, Job, Size, UnavailableError
    from nanovllm import LLM
    from nanovllm.benchmark.shapes import SHAPES

    launched, rehearsed = set[tuple[str, str]](), set[tuple[str, str]]()
    into = [launched]

    class Listening(AtOnce):
        @contextlib.contextmanager
        def rehearsal(self) -> Iterator[None]:
            into.append(rehearsed)
            yield
            into.pop()

    def hear(*, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        into[-1].add((fn.name, compile["specialization_data"]))
        return True

    builder.Compiler = Listening
    triton.knobs.runtime.jit_cache_hook = hear
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[shape] | {"num_hidden_layers": num_layers}
        config["quantization_config"] = quantization_config
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
        Path(directory, "config.json").write_text(json.dumps(config))
        with LLM(directory, load_format="dummy", **options) as llm:
            found = {"start": launched & rehearsed, "start, not rehearsed": launched - rehearsed}
            found["later"], known = rehearsed - launched, launched | rehearsed
            for name in [name for name in kinds or KINDS if name not in NEEDS_RESULTS]:
                launched.clear()
                try:
                    KINDS[name](Job(llm, random.Random(name), Size.of(num_seqs)))()
                except UnavailableError:
                    continue
                found[name] = launched - known
    return {
        what: dict(sorted(Counter(name for name, _ in kernels).items()))
        for what, kernels in found.items()
    }


def variants(
    shape: str, architecture: str, config: dict[str, Any] | None = None, **options: Any
) -> list[tuple[str, str]]:
    """The kernels that an engine launches for all it can, each variant once. Libraries may multiply
    nothing. Nothing is compiled.
    """

    def refuse(*args: object, **how: object) -> None:
        raise AssertionError("a product by a library")

    launched = set[tuple[str, str]]()

    def hear(*, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        launched.add((fn.name, compile["specialization_data"]))
        return True

    triton.knobs.runtime.jit_cache_hook = hear
    with pytest.MonkeyPatch.context() as patch:
        for place, name in (
            *((torch, each) for each in ("mm", "addmm", "matmul", "bmm", "_scaled_mm")),
            *((torch.Tensor, each) for each in ("mm", "matmul", "__matmul__")),
            (torch.nn.functional, "linear"),
        ):
            patch.setattr(place, name, refuse)
        compile_engine(shape, 128, architecture, config, **options)
    return sorted(launched)


def generate(model: str, **options: Any) -> list[Any]:
    """Answers of an engine with a real model, by the controls."""
    from nanovllm import LLM, SamplingParams

    with LLM(model, **options) as llm:
        params = [SamplingParams(max_tokens=4, seed=5, **own) for own in CONTROLS]
        outputs = llm.generate([[7] * 40] * len(params), params, use_tqdm=False)
        return [str(llm.metrics()["attention_backend"]), [o["token_ids"] for o in outputs]]


KINDS: dict[str, Callable[..., Any]] = {
    "engine": compile_engine,
    "attention": compile_attention,
    "images": compile_images,
    "long prompts": compile_long_prompts,
    "gated products": compile_gated_products,
    "INT4 products": compile_int4_products,
    "packed experts": compile_packed_experts,
    "delta net": compile_delta_net,
    "kernel counts": count_kernels,
    "generate": generate,
    "variants": variants,
}


if __name__ == "__main__":
    card = CARDS[sys.argv[1]]
    put_in(card)
    builder.Compiler = AtOnce
    with OnCard(CPU if sys.argv[1] == "7.5" else META):
        print(json.dumps([KINDS[job.pop("kind")](**job) for job in json.loads(sys.argv[2])]))
