"""`batch_invariant`: every call gives the bits that each request has alone, with an adapter."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("peft")

from calls import CHUNKS, OPTIONS, REQUESTS, TEXTS, alone, of_texts, run, shown
from invariance import Watch, preempt_each, was_preempted
from peft_adapters import make_adapter

from checkpoints import TINY, gather
from nanovllm import LLM, AsyncLLM, RequestOutput

Wanted = tuple[list[Any], list[Any]]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(TINY, tmp_path_factory.mktemp("calls") / "adapter")


@pytest.fixture(scope="module")
def wanted(adapter: Path) -> Wanted:
    """Of an engine that begins with the adapter."""
    return alone(adapter=adapter)


def test_one_engine(adapter: Path, wanted: Wanted) -> None:
    """Requests of all kinds beside each other, in chunks, each preempted after some token, most
    with a prefix in the cache; then as streams; then scores, vectors and beams of all texts.
    """
    outputs, texts = wanted
    with LLM(TINY, **{**OPTIONS, **CHUNKS}) as llm:
        plain = run(llm, REQUESTS[-1:])
        llm.load_adapter(adapter)
        with pytest.MonkeyPatch.context() as patch:
            preempt_each(patch, 4)
            watch = Watch(patch)
            found = run(llm)
        assert [*map(shown, found)] == outputs
        assert [*map(shown, plain)] != outputs[-1:], "the adapter changes nothing"
        assert sum(map(was_preempted, found)) > len(found) / 2
        assert len(watch.chunked) > 1 and watch.largest == CHUNKS["max_num_seqs"]
        assert any(output.num_cached_tokens for output in found)
        prompts, params = zip(*REQUESTS, strict=True)
        streamed = gather(llm.stream(prompts, params))
        said = [[facts[2] for facts in streamed[i]] for i in sorted(streamed)]
        assert said == [[each[2] for each in whole[1:]] for whole in outputs]
        places = [[facts[5] for facts in streamed[i]] for i in sorted(streamed)]
        assert places == [[each[4] for each in whole[1:]] for whole in outputs]
        assert of_texts(llm, TEXTS) == texts


@pytest.mark.slow  # replicas say what one engine says, and coroutines what its streams do
@pytest.mark.skipif(sys.platform != "linux", reason="replicas are tried on Linux only")
def test_coroutines_over_replicas(adapter: Path, wanted: Wanted) -> None:
    async def main() -> list[RequestOutput]:
        async with AsyncLLM(TINY, data_parallel_size=2, **{**OPTIONS, **CHUNKS}) as llm:
            await llm.load_adapter(adapter)

            async def last(text: str, params: Any) -> RequestOutput:
                return [output async for output in llm.generate(text, params)][-1]

            return await asyncio.gather(*(last(*request) for request in REQUESTS))

    assert [*map(shown, asyncio.run(main()))] == wanted[0]
