"""`batch_invariant`: a token's log-probability has the same bits whatever else is in its step.

On a CPU, in plain PyTorch; the kernels' part is in tests/kernels/test_invariant_kernels.py.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp8_checkpoints
import int4_checkpoints
import pytest
import torch
from invariance import CHECKPOINTS, Workload, bits, differences
from new_weights import with_other_values
from safetensors.torch import load_file

from checkpoints import SMALL, make_checkpoint, outputs_of, rare, with_rare
from nanovllm import LLM, RequestOutput
from nanovllm.distributed.group import Group
from nanovllm.engine.step_inputs import to_device
from nanovllm.layers.weights import onednn
from nanovllm.sizing.activations import warmup_batch
from nanovllm.startup import builder

# What others have as well: windows and experts gpt-oss, states of layers qwen3.5 and lfm2.
SELDOM = {"gemma 2", "gemma 3", "olmo 2", "qwen3 moe", "qwen3.5 moe"}
OPTIONS: dict[str, Any] = {
    **SMALL,
    "batch_invariant": True,
    "num_kvcache_blocks": 64,
    "max_model_len": 256,
}
# Chunks end within blocks, tiles and the chunks of the delta rule.
WAYS: dict[str, dict[str, Any]] = {
    "batch": {"max_num_batched_tokens": 512},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "preempted": {"max_num_batched_tokens": 37},
    "hits": {"max_num_batched_tokens": 45},
}
LENGTHS = (1, 14)
SEED = 20260


def work(
    lengths: tuple[int, ...] = LENGTHS, shared: int = 17, max_tokens: int = 4, **options: Any
) -> Workload:
    return Workload(SEED, lengths, max_tokens, shared=shared, **options)


@pytest.mark.parametrize("name", with_rare(CHECKPOINTS, *SELDOM))
def test_bits_depend_on_nothing_else(name: str, tmp_path: Path) -> None:
    family, shape = CHECKPOINTS[name]
    path = make_checkpoint(tmp_path / "model", family, **shape)
    # Layers with a state begin at a snapshot after 64 tokens.
    has_states = "linear_num_key_heads" in shape or "conv_L_cache" in shape
    ways, own = WAYS, work(shared=64, max_tokens=6) if has_states else work()
    if name == "gemma 3":  # most of its layers give back what their window has left
        ways = WAYS | {"preempted": WAYS["preempted"] | {"num_kvcache_blocks": 6}}
        own = work((1, 14, 30), max_tokens=6)
    assert differences(path, own, OPTIONS, ways) == []


@pytest.mark.parametrize("way", ["fp8 rows", rare("fp8 blocks"), rare("int4")])
def test_bits_of_codes_that_become_numbers(way: str, tmp_path: Path) -> None:
    """On a CPU they do after loading."""
    kind, _, scales = way.partition(" ")
    if kind == "fp8":
        path, _ = fp8_checkpoints.checkpoints(tmp_path, scales)
    else:
        path, _ = int4_checkpoints.checkpoints(tmp_path, "gptq", head_dim=32)
    assert differences(path, work(), OPTIONS, WAYS) == []


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"},
        rare({"dtype": "bfloat16"}),
        rare({"fused_kernels": False}),
        rare({"overlap": True, "mixed_steps": False}),
    ],
    ids=str,
)
def test_bits_with_other_options(options: dict[str, Any], checkpoint: Path) -> None:
    assert differences(checkpoint, work(), OPTIONS | options, WAYS) == []


MANY: dict[str, Any] = {"max_model_len": 128, "num_kvcache_blocks": 2048}
ALL_WAYS: dict[str, dict[str, Any]] = {
    "batch": {"max_num_batched_tokens": 2048},
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 11},
    "preempted": {"max_num_batched_tokens": 512, "num_kvcache_blocks": 1024},
    "hits": {"max_num_batched_tokens": 600},
}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of few operators: each takes as long as Python needs to call it."""
    path = tmp_path_factory.mktemp("invariance") / "model"
    return make_checkpoint(path, "llama", num_hidden_layers=1)


def differences_of_each(path: Path, count: int, at_once: int, **options: Any) -> list[str]:
    """The ways in which any of many prompts differs, when each has come in all of them.

    Args:
        path: checkpoint.
        count: number of prompts.
        at_once: size of the batch.
    """
    rng = random.Random(SEED)
    work = Workload(SEED, [rng.randrange(1, 7) for _ in range(count)], 5, shared=17)
    ways = {way: {"max_num_seqs": at_once, **own} for way, own in ALL_WAYS.items()}

    def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
        return llm.generate(prompts, params, use_tqdm=False)

    return differences(path, work, OPTIONS | MANY | options, ways, generate, each=True)


def test_each_prompt_in_all_ways(one_layer: Path) -> None:
    """The small form of the next one."""
    assert differences_of_each(one_layer, count=9, at_once=8) == []


@pytest.mark.slow
def test_a_thousand_prompts_in_batches_of_256(one_layer: Path) -> None:
    """Each alone, in a batch, in chunks, preempted, and with its prefix in the cache."""
    assert differences_of_each(one_layer, count=1000, at_once=256) == []


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_each_prompt_in_all_ways_on_two_ranks(one_layer: Path) -> None:
    options = {"tensor_parallel_size": 2}
    assert differences_of_each(one_layer, count=16, at_once=12, **options) == []


@pytest.fixture
def threads_of_torch(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, rare(2)])
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.usefixtures("threads_of_torch")
def test_without_it_bits_differ(invariant: bool, num_threads: int, tmp_path: Path) -> None:
    """Large enough for oneDNN's packed weights, and for threads that divide a product."""
    shape = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 512}
    path = make_checkpoint(tmp_path / "model", num_key_value_heads=1, **shape)
    options = OPTIONS | {"batch_invariant": invariant}
    ways = {way: WAYS[way] for way in ("batch", "chunks")}
    wrong = differences(path, work((14, 2), vocab_size=512), options, ways)
    print(wrong)
    assert (wrong == []) == invariant


@pytest.mark.usefixtures("threads")
def test_ranks_agree_with_themselves(checkpoint: Path) -> None:
    """With one rank, bits are others: each of two has half of the sums."""
    assert differences(checkpoint, work(), OPTIONS | {"tensor_parallel_size": 2}, WAYS) == []


@pytest.mark.parametrize("quantization", [None, rare("fp8")])
def test_bits_of_new_weights(
    quantization: str | None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, side by side, they are those of each alone in an engine that begins with them."""
    monkeypatch.setattr(onednn, "MIN_WEIGHT", 0)
    other, own = with_other_values(checkpoint, tmp_path / "other"), work()
    options = {**OPTIONS, "quantization": quantization}
    requests = own.prompts, own.all_params()
    with LLM(other, **{**options, **WAYS["batch"]}) as fresh:
        wanted = [outputs_of(fresh, [p], [params])[0] for p, params in zip(*requests, strict=True)]
    with LLM(checkpoint, **{**options, **WAYS["chunks"]}) as llm:
        before = outputs_of(llm, *requests)
        llm.update_weights(load_file(other / "model.safetensors"))
        after = outputs_of(llm, *requests)
    assert [*map(bits, after)] == [*map(bits, wanted)] != [*map(bits, before)]


def test_bits_with_an_adapter(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft_adapters import make_adapter

    adapter = make_adapter(checkpoint, tmp_path / "adapter")
    assert differences(checkpoint, work(), OPTIONS | {"adapter": str(adapter)}, WAYS) == []


def test_means_do_not_depend_on_chunks(checkpoint: Path) -> None:
    prompts = work().prompts
    found = []
    for own in (WAYS["batch"], WAYS["chunks"]):
        with LLM(checkpoint, **{**OPTIONS, **own}) as llm:
            found.append([each.outputs.embedding for each in llm.embed(prompts, "mean")])
    assert found[0] == found[1]


@pytest.mark.parametrize("controls", [{"top_p": 0.9}, {"min_p": 0.1, "logit_bias": {5: 2.0}}])
def test_draws_with_controls_do_not_depend_on_others(
    controls: dict[str, Any], checkpoint: Path
) -> None:
    own = work()
    mixed = [own.params(i, **controls) if i % 2 else own.params(i) for i in range(len(LENGTHS))]
    with LLM(checkpoint, **OPTIONS) as llm:
        beside = outputs_of(llm, own.prompts, mixed)
        single = [outputs_of(llm, [own.prompts[i]], [mixed[i]])[0] for i in range(len(LENGTHS))]
    assert [each["token_ids"] for each in beside] == [each["token_ids"] for each in single]
    assert [each.outputs[0].logprobs[:] for each in beside] == [
        each.outputs[0].logprobs[:] for each in single
    ]


def test_warm_up_computes_one_token_of_a_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The largest steps of an engine on a GPU have thousands; and the log says how they are
    computed.
    """
    with caplog.at_level("INFO", logger="nanovllm"), LLM(checkpoint, **OPTIONS) as llm:
        assert caplog.text.count("each token is a step of its own") == 1
        built = llm.model_runner.built
        inputs = to_device(warmup_batch(3, 50, 256, 16), built.device)
        num_passes, found = [], []

        def measure(compute: Any, *_: Any) -> int:
            found.append(built.step.run_model(inputs))
            return len(num_passes)

        built.step.model.register_forward_hook(lambda *_: num_passes.append(1))
        monkeypatch.setattr(builder, "max_activations", measure)
        own = builder.Builder(llm.config, llm.model_config, Group())
        own.device = torch.device("cuda")
        with torch.inference_mode():
            assert own.measure(built.step, built.pool, built.extras, built.build) == 1
            found.append(built.step.run_model(inputs))
    assert len(num_passes) == 1 + 50
    short, whole = ((each.hidden.shape, each.logits.shape) for each in found)
    assert short == whole == ((3, 64), (3, 128))


def test_flash_attention_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="must be 'auto', 'triton' or 'torch' with"):
        LLM(checkpoint, **OPTIONS, attention_backend="flash_attn")
