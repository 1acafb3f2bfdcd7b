"""A model that is split over ranks computes what it computes in one piece.

With workers where processes matter, else with ranks in threads (`ranks_in_threads.py`), whose
logits can be read. The oracle is transformers.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_in_threads import ranks_of
from tiny_reference import GREEDY, assert_greedy, make_prompts
from transformers import Qwen3ForCausalLM

from checkpoints import SMALL, generate_checked, greedy, make_checkpoint, rare, references, tokens
from checkpoints import assert_greedy as assert_continued
from nanovllm import LLM, SamplingParams
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.plan import max_plan_bytes
from nanovllm.layers.embed_head import local_vocab
from nanovllm.ranks.channel import Channel
from nanovllm.ranks.workers import OVERHEAD

SEED = 17

# Prompts with a common prefix and of many lengths, greedy but for the last four.
SHARED = list(range(33))
PROMPTS = [[*SHARED, 50 + i] for i in range(3)] + [[i + 1] * (11 * i + 1) for i in range(5)]
PROMPTS += [[*SHARED, 99], [3, 1, 4, 1, 5], [77] * 20, [8]]
LENGTHS = [20, 9, 30, 30, 1, 25, 12, 6, 16, 24, 20, 28]
NUM_GREEDY = 8
PARAMS = [greedy(n) for n in LENGTHS[:NUM_GREEDY]] + [
    SamplingParams(temperature=t, max_tokens=n)
    for t, n in zip([2.0, 4.0, 3.0, 0.7], LENGTHS[NUM_GREEDY:], strict=True)
]

# Two with a common block of 256, two that outgrow their first.
LONG_PROMPTS = [[*(7 * i % 100 for i in range(260)), 50 + i] for i in range(2)]
LONG_PROMPTS += [[(5 * i + j) % 90 for i in range(250)] for j in (1, 2)]
LONG_LENGTHS = [24, 24, 12, 12]
LONG_PARAMS = [greedy(n) for n in LONG_LENGTHS]

CHECKPOINTS: dict[str, dict[str, Any]] = {
    # The last of two ranks has fewer tokens than the first, the last of four has none.
    "odd": {
        "vocab_size": 131,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "shard": "100KB",
    },
    "uneven": {"vocab_size": 180, "num_key_value_heads": 2},
    "wide": {  # its products are oneDNN's
        "vocab_size": 1060,
        "hidden_size": 512,
        "intermediate_size": 1100,
        "initializer_range": 0.1,
    },
    "one layer": {"num_hidden_layers": 1, "max_position_embeddings": 8192},
    "long": {"max_position_embeddings": 1024},
    "eight heads": {
        "vocab_size": 131,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "attention_bias": True,
    },
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds the checkpoints of this file, once each."""
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            path = tmp_path_factory.mktemp("parallel") / name.replace(" ", "-")
            built[name] = make_checkpoint(path, seed=SEED, **CHECKPOINTS[name])
        return built[name]

    return build


# -- tokens, under pressure -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("odd", 2, {"mixed_steps": False, "overlap": True}),
        rare("odd", 4, {"overlap": True}),
        rare("uneven", 4, {"mixed_steps": False}),
    ],
    ids=["two-odd-prefill-first-overlap", "four-odd-overlap", "four-prefill-first"],
)
@pytest.mark.usefixtures("low_guesses")
def test_tokens_do_not_depend_on_the_number_of_ranks(
    name: str, size: int, options: dict[str, Any], make: Any
) -> None:
    """Chunks, prefix hits and preemption at once. What is sampled is what one rank samples: a user
    who adds a GPU must not get other texts.
    """
    path = make(name)
    options = {"max_num_batched_tokens": 24, "num_kvcache_blocks": 9, **options}
    assert max(map(len, PROMPTS)) > 24
    outputs, metrics = generate_checked(path, PROMPTS, PARAMS, tensor_parallel_size=size, **options)
    found = tokens(outputs)
    assert metrics["tensor_parallel_size"] == size
    assert metrics["all_reduce"] == "gloo"
    assert metrics["num_preemptions"] > 0
    assert metrics["num_cached_tokens"] > 0
    greedy_tokens = references(path, PROMPTS, LENGTHS)
    assert found[:NUM_GREEDY] == greedy_tokens[:NUM_GREEDY]
    assert found == tokens(generate_checked(path, PROMPTS, PARAMS, **options)[0])
    sampled = zip(found[NUM_GREEDY:-1], greedy_tokens[NUM_GREEDY:-1], strict=True)
    assert all(len(set(drawn)) > 8 and drawn != best for drawn, best in sampled), "no chance"


@pytest.mark.parametrize("overlap", [rare(False), True], ids=["synchronous", "overlap"])
@pytest.mark.usefixtures("threads", "low_guesses")
def test_defect_8_a_preempted_sequence_has_its_tokens_on_all_ranks(
    overlap: bool, make: Any
) -> None:
    """Workers had been told a sequence's tokens once; after a preemption they computed garbage."""
    path = make("uneven")
    prompts = [[9 * i + j for i in range(14)] for j in range(6)]  # distinct: nothing is cached
    params = [greedy(30)] * 6
    outputs, metrics = generate_checked(
        path, prompts, params, tensor_parallel_size=2, num_kvcache_blocks=7, overlap=overlap,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert metrics["overlap"] == overlap
    assert metrics["num_preemptions"] > 1
    assert metrics["num_prefill_tokens"] > sum(map(len, prompts)), "nothing was computed again"
    assert tokens(outputs) == references(path, prompts, [30] * 6)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"kvcache_block_size": 256, "num_kvcache_blocks": 4, "overlap": True}),
        rare(4, {"kvcache_block_size": 256, "num_kvcache_blocks": 4}),
        rare(2, {"kvcache_block_size": 32, "num_kvcache_blocks": 26}),
    ],
    ids=["256-two", "256-four", "32-two"],
)
@pytest.mark.usefixtures("threads", "low_guesses")
def test_defect_9_every_rank_has_the_block_size_of_the_engine(
    size: int, options: dict[str, Any], make: Any
) -> None:
    """Workers kept a default of their own and wrote keys and values into other slots."""
    path = make("long")
    options = {"max_model_len": 640, "max_num_batched_tokens": 100, **options}
    options = {"tensor_parallel_size": size, **options}
    outputs, metrics = generate_checked(path, LONG_PROMPTS, LONG_PARAMS, **options)
    assert tokens(outputs) == references(path, LONG_PROMPTS, LONG_LENGTHS)
    assert metrics["num_cached_tokens"] >= 256
    assert metrics["num_preemptions"] > 0
    assert metrics["num_steps"] > sum(map(len, LONG_PROMPTS)) // 100


@pytest.mark.parametrize("size", [2, rare(4)])
@pytest.mark.usefixtures("threads", "low_guesses")
def test_the_embedded_checkpoint_token_for_token(tiny: str, reference: Any, size: int) -> None:
    prompts = [prompt for prompt in make_prompts() if len(prompt) < 100][:40:2]
    prompts += [prompts[-1] + prompts[0]] * 2
    options: dict[str, Any] = {
        "kvcache_block_size": 16,
        "num_kvcache_blocks": 14,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 40,
    }
    with LLM(tiny, tensor_parallel_size=size, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        metrics = llm.metrics()
        texts = [output["text"] for output in llm.generate(["127+345="], GREEDY, use_tqdm=False)]
    assert_greedy(reference, prompts, tokens(outputs))
    assert texts == ["472"]
    assert metrics["num_preemptions"] > 0
    assert metrics["num_cached_tokens"] > 0


@pytest.mark.slow  # test_plan.py has bounds of what is sent, with random requests
@pytest.mark.parametrize("block_size", [16, 256])
def test_defect_11_messages_do_not_grow_with_cached_prompts(
    block_size: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 cached prompts of 4,096 tokens overflowed a fixed message, and the workers waited for
    ever. A step sends what is new, and where nothing is, 4,096 tokens cost what 64 cost.
    """
    path, num_seqs, max_len = make("one layer"), 64, 4352
    sent: list[int] = []
    capacities: set[int] = set()
    write = Channel.write

    def record(self: Channel, message: bytes) -> None:
        sent.append(len(message))
        capacities.add(self._capacity)
        write(self, message)

    monkeypatch.setattr(Channel, "write", record)
    options: dict[str, Any] = {
        "device": "cpu",
        "kvcache_block_size": block_size,
        "num_kvcache_blocks": 4096 // block_size + 3 * num_seqs,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": 4160,
        "max_model_len": max_len,
    }
    print("seed", SEED)
    rng = random.Random(SEED)
    long = [rng.randrange(128) for _ in range(4096)]
    params, per_step = greedy(4), {}
    with LLM(path, tensor_parallel_size=2, **options) as llm:
        llm.generate([[*long, 0]], greedy(1), use_tqdm=False)
        for shared in (long, long[:64]):
            sent.clear()
            prompts = [[*shared, i] for i in range(num_seqs)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            cached = {output.num_cached_tokens for output in outputs}
            assert cached == {len(shared) // block_size * block_size}
            assert_continued(path, prompts[::63], outputs[::63])
            assert len(sent) >= 4
            per_step[len(shared)] = sent[-2:]  # decodes that need no new block
            bound = max_plan_bytes(num_seqs, 4160, -(-max_len // block_size)) + OVERHEAD
            assert capacities == {bound}
            assert max(sent) <= bound
        assert llm.metrics()["num_preemptions"] == 0
    assert per_step[64] == per_step[4096], per_step
    assert max(per_step[64]) < 64 * 40 + OVERHEAD


# -- log-probabilities and memory, with ranks in threads ------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(rare("eight heads", n) for n in (1, 2)),
        ("eight heads", 4),
        pytest.param("eight heads", 8, marks=pytest.mark.slow),
        ("wide", 2),
    ],
)
@pytest.mark.usefixtures("threads")
def test_log_probabilities_are_those_of_transformers(name: str, size: int, make: Any) -> None:
    """Within 1e-4 over the whole vocabulary, for prefill in chunks and for decode: an error that
    greedy tokens hide would bend what is sampled.
    """
    path, V = make(name), CHECKPOINTS[name]["vocab_size"]
    oracle = Qwen3ForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    print("seed", SEED)
    rng = random.Random(SEED)
    with LLM(path, tensor_parallel_size=size, **SMALL) as llm:
        ranks = ranks_of(llm)
        assert len(ranks.runners) == size
        groups = [runner.group for runner in ranks.runners]
        columns = [len(local_vocab(V, group.rank, group.size)) for group in groups]
        assert sum(columns) == V and sum(n > 0 for n in columns) >= min(size, 3)
        weights = [runner.model.lm_head.weight for runner in ranks.runners]
        onednn = name == "wide" and torch.backends.mkldnn.is_available()
        assert {weight.data.is_mkldnn for weight in weights} == {onednn}
        for length in (1, 16, 17, 90):
            prompt = [rng.randrange(V) for _ in range(length)]
            (output,) = llm.generate([prompt], greedy(5), use_tqdm=False)
            parts = ranks.take_logits()
            assert [part.shape[1] for part in parts] == columns
            found = torch.cat(parts, dim=1)
            with torch.inference_mode():
                ids = torch.tensor([prompt + output["token_ids"][:-1]])
                logits = oracle(ids).logits[0, length - 1 :]
            assert found.shape == logits.shape == (5, V)
            torch.testing.assert_close(
                found.log_softmax(-1), logits.log_softmax(-1), atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("size", [2, rare(4)])
@pytest.mark.usefixtures("threads", "low_guesses")
def test_defect_2_ranks_agree_on_the_smallest_number_of_blocks(
    size: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank sized its pool by its own memory; one then wrote beyond the end of its own."""
    path = make("uneven")
    by_rank = [12, 9, 10, 11]
    monkeypatch.setattr(KVCachePool, "how_many_fit", lambda self, *_: by_rank[self.group.rank])
    options = {**SMALL, "max_num_batched_tokens": 24, "num_kvcache_blocks": -1}
    with LLM(path, tensor_parallel_size=size, **options) as llm:
        assert [runner.built.num_blocks for runner in ranks_of(llm).runners] == [9] * size
        assert [len(keys_of(runner)[0]) for runner in ranks_of(llm).runners] == [9] * size
        assert llm.metrics()["num_kvcache_blocks"] == len(llm.scheduler.block_manager.blocks) == 9
        outputs = llm.generate(PROMPTS[2:8], PARAMS[2:8], use_tqdm=False)
        assert llm.metrics()["num_preemptions"] > 0
    assert_continued(path, PROMPTS[2:8], outputs)


def keys_of(runner: ModelRunner) -> list[torch.Tensor]:
    """The cached keys of each layer."""
    return [layer.self_attn.attn.cache.k for layer in runner.model.model.layers]


@pytest.mark.usefixtures("threads")
def test_kv_heads_are_divided_or_repeated(make: Any) -> None:
    """A rank holds its share of the KV heads and no more: memory is why a model is split."""
    for size, heads in ((1, 2), (2, 1), (4, 1)):
        with LLM(make("uneven"), tensor_parallel_size=size, **SMALL) as llm:
            for runner in ranks_of(llm).runners:
                assert [keys.shape for keys in keys_of(runner)] == [(32, 16, heads, 32)] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("threads")
def test_ranks_sum_in_16_bits_too(dtype: str, tiny: str) -> None:
    """The sum is as good as one rank's: within a few roundings of its logits."""
    found = []
    for size in (1, 2):
        with LLM(tiny, tensor_parallel_size=size, dtype=dtype, num_kvcache_blocks=4) as llm:
            assert llm.generate(["127+345="], GREEDY, use_tqdm=False)[0]["text"] == "472"
            found.append(torch.cat(ranks_of(llm).take_logits(), dim=1).float())
    scale = found[0].abs().max()
    assert (found[0] - found[1]).abs().max() < 0.02 * scale
    assert not torch.equal(*found), "nothing was split"
