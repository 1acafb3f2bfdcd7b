"""Mistakes at the engine's door, each refused by name; and numpy's numbers, which are none."""

import numpy as np
import pytest

from checkpoints import (
    PROMPT,
    PROMPTS,
    SMALL,
    TINY,
    assert_usable,
    copy_checkpoint,
    greedy,
    reference,
    tokens,
)
from nanovllm import LLM, SamplingParams


def test_numpy_options_build_a_working_engine(checkpoint):
    """Numbers that come out of arrays; small integer types would overflow in products."""
    options = {**SMALL, "num_kvcache_blocks": np.uint8(32), "kvcache_block_size": np.int8(16)}
    options |= {"max_num_seqs": np.int64(8), "max_num_batched_tokens": np.uint16(64)}
    options |= {"max_model_len": np.uint8(128), "seed": np.uint64(2**63 + 1)}
    with LLM(checkpoint, gpu_memory_utilization=np.float32(0.5), **options) as llm:
        assert llm.metrics()["num_kvcache_blocks"] == 32
        prompts = [*PROMPTS, [1] * 120]
        outputs = llm.generate(prompts, greedy(8), use_tqdm=False)
        assert tokens(outputs) == [reference(checkpoint, p, 8) for p in prompts]
        llm.generate(prompts, SamplingParams(temperature=np.float32(1)), use_tqdm=False)
        assert_usable(llm, checkpoint)
    limit = {**SMALL, "num_kvcache_blocks": -1, "kv_cache_memory_bytes": np.int32(2**20)}
    with LLM(checkpoint, **limit) as llm:
        assert llm.metrics()["num_kvcache_blocks"] == 2**20 // (2 * 2 * 16 * 2 * 32 * 4)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64])
def test_numpy_max_tokens_do_not_overflow(kind):
    """`max_tokens=np.uint8(20)` after 300 tokens was an OverflowError in the scheduler."""
    with LLM(TINY, **{**SMALL, "max_model_len": 400, "num_kvcache_blocks": 64}) as llm:
        params = SamplingParams(temperature=0, max_tokens=kind(20), ignore_eos=True)
        outputs = llm.generate([[65] * 300, [66] * 120, [67]], params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [20] * 3


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"model": {"type": "?"}}', "\x00\xff"])
def test_broken_tokenizer_is_named(text, tmp_path):
    """Defect 18: it was whatever the tokenizers library panics with."""
    path = copy_checkpoint(TINY, tmp_path / "model")
    (path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=rf"the tokenizer of {path} cannot be loaded.*complete\?"):
        LLM(path, **SMALL)


@pytest.mark.parametrize("text", ["\ud800", "fine, then \udfff"])
def test_text_that_is_not_unicode_is_named(text):
    with LLM(TINY, **SMALL) as llm:
        before = llm.metrics()
        for prompts, name in ((text, "prompts"), (["ok", {"prompt": text}], r"prompts\[1\]")):
            with pytest.raises(ValueError, match=f"`{name}` cannot be tokenised"):
                llm.generate(prompts, use_tqdm=False)
        with pytest.raises(ValueError, match="`prompt` cannot be tokenised"):
            llm.add_request(text)
        assert llm.metrics() == before


def test_add_request_takes_one_sampling_params(llm, checkpoint):
    for params in ([greedy(3)], {"max_tokens": 3}, 3):
        with pytest.raises(TypeError, match="`sampling_params` must be a SamplingParams, got "):
            llm.add_request(PROMPT, params)
    assert_usable(llm, checkpoint)


@pytest.mark.parametrize(
    ("model", "error"), [("", ValueError), (None, TypeError), (3, TypeError), (b"x", TypeError)]
)
def test_model_must_be_a_path(model, error):
    """`LLM("")` read the current directory."""
    with pytest.raises(error, match="`model` must be the directory"):
        LLM(model, **SMALL)


@pytest.mark.parametrize("blocks", [10**12, 10**15, 10**30])
def test_impossible_pool_is_refused_with_remedy(blocks, checkpoint):
    """It ended in a MemoryError, or in numpy's "Maximum allowed dimension exceeded"."""
    with pytest.raises(ValueError, match=rf"KV cache of {blocks} .*lower num_kvcache_blocks"):
        LLM(checkpoint, **{**SMALL, "num_kvcache_blocks": blocks})
    limit = {"num_kvcache_blocks": -1, "kv_cache_memory_bytes": blocks * 10**6}
    with pytest.raises(ValueError, match=r"lower .* kv_cache_memory_bytes"):
        LLM(checkpoint, **{**SMALL, **limit})
