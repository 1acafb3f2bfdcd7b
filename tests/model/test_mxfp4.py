"""gpt-oss's experts in 4 bits against transformers' reading of them."""

from pathlib import Path

import pytest
from mxfp4_checkpoints import checkpoints
from ranks_in_threads import ranks_of

from checkpoints import PARAMS, PROMPTS, SMALL, assert_right
from nanovllm import LLM


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1, 2])
def test_tokens_are_those_of_transformers(size: int, tmp_path: Path) -> None:
    """Two ranks divide the inner size within a block: 48 numbers each."""
    packed, plain = checkpoints(tmp_path)
    with LLM(packed, tensor_parallel_size=size, **SMALL) as llm:
        assert size == 1 or len(ranks_of(llm).runners) == size
        assert_right(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
