"""Controls of sampling on CUDA devices: what a CPU gives, in float32 on the embedded checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_multi_gpu import SIZES
from tiny_reference import make_prompts

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.benchmark.shapes import SHAPES
from nanovllm.sampling import extra_results, reporting

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"num_kvcache_blocks": 256, "max_num_seqs": 64, "dtype": "float32"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
CONTROLS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"logit_bias": {52: 5.0, 55: -4.0}},
    {"allowed_token_ids": [48, 49, 50, 51, 97]},
    {"bad_words": ["4", "72"]},
    {"min_tokens": 8, "ignore_eos": False},
    {"logprobs": 4},
    {"prompt_logprobs": 2, "repetition_penalty": 1.2, "logprobs": 0},
    {"stop": ["7", "l"]},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "logprobs": 1},
    # These leave one token to draw.
    {"top_k": 1, "temperature": 2.0},
    {"top_p": 1e-9, "temperature": 0.5},
    {"min_p": 1.0, "temperature": 1.0},
    {"top_k": 1, "temperature": 2.0, "logprobs": 3, "logprobs_mode": "processed_logprobs"},
    {"top_k": 1, "temperature": 0.7, "logprobs": 0, "logprobs_mode": "temperature_logprobs"},
    {"logprobs": 0, "logprobs_mode": "temperature_logprobs"},
    {"logprobs": 0},
    {
        "logprob_token_ids": [52, 55, 3],
        "logit_bias": {52: 1.0},
        "logprobs_mode": "processed_logprobs",
    },
    {"allowed_token_ids": [48, 49, 50, 97], "return_sampling_mask": True},
    {"top_k": 1, "temperature": 1.0, "min_tokens": 5, "return_sampling_mask": True},
]
FORM = StructuredOutputsParams(regex="[a-f]{3}[0-9]{4}")


def requests() -> tuple[list[Any], list[SamplingParams]]:
    params = [SamplingParams(**(GREEDY | own)) for own in CONTROLS * 2]
    return (make_prompts()[10::2] * 2)[: len(params)], params


def results(**options: Any) -> list[Any]:
    prompts, params = requests()
    with LLM(options.pop("model"), **SMALL, **options) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for mine, other in zip(found, wanted, strict=True):
        a, b = mine.outputs[0], other.outputs[0]
        assert (a.token_ids, a.text) == (b.token_ids, b.text)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert a.sampling_mask == b.sampling_mask
        pairs = (a.logprobs, b.logprobs), (mine.prompt_logprobs, other.prompt_logprobs)
        for places, others in pairs:
            assert (places is None) == (others is None)
            for place, wanted_place in zip(places or (), others or (), strict=True):
                if wanted_place is None:
                    assert place is None
                    continue
                first = next(iter(wanted_place))
                assert next(iter(place)) == first
                for token in place.keys() & wanted_place.keys():
                    assert abs(place[token].logprob - wanted_place[token].logprob) < 1e-3
    assert any(output.outputs[0].logprobs for output in found)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"overlap": False}], ids=str)
def test_greedy_requests_with_controls_are_those_of_a_cpu(
    options: dict[str, Any], tiny: str
) -> None:
    """Everything at once, in chunks beside decodes, with sequences that wait for room."""
    wanted = results(model=tiny, device="cpu")
    found = results(model=tiny, device="cuda", max_num_batched_tokens=64, **options)
    assert_same(found, wanted)


def test_controls_in_steps_with_prompts_that_replay_graphs(tiny: str) -> None:
    """Three times: a shape is computed kernel by kernel, then captured, then replayed. Few places,
    so that prompts come beside decodes.
    """
    wanted = results(model=tiny, device="cpu")
    prompts, params = requests()
    options = {**SMALL, "max_num_seqs": 8, "max_num_batched_tokens": 1024}
    with LLM(tiny, enable_prefix_caching=False, **options) as llm:
        for _ in range(3):
            assert_same(llm.generate(prompts, params, use_tqdm=False), wanted)
        assert llm.model_runner is not None and llm.model_runner.graphs is not None
        captured = [shape for shape in llm.model_runner.graphs.captured if shape.tokens]
    print(captured)
    assert any(shape.decodes for shape in captured)


def test_filters_leave_what_they_leave_on_a_cpu(tiny: str) -> None:
    """A GPU has draws of its own. A CPU says how likely each was."""
    filters: list[dict[str, Any]] = [
        {"top_k": 3, "temperature": 3.0},
        {"min_p": 0.2, "temperature": 3.0},
        {"top_p": 0.7, "temperature": 1.0},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.0},
    ] * 4
    length = {"max_tokens": 16, "ignore_eos": True}
    params = [SamplingParams(seed=i, **length, **own) for i, own in enumerate(filters)]
    with LLM(tiny, **SMALL) as llm:
        drawn = llm.generate(make_prompts()[: len(params)], params, use_tqdm=False)
    texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in drawn]
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    with LLM(tiny, device="cpu", **SMALL) as llm:
        scored = llm.generate(texts, score, use_tqdm=False)
    ranks = []
    for text, output, own in zip(texts, scored, filters, strict=True):
        for token, place in list(zip(text, output.prompt_logprobs, strict=True))[-16:]:
            mine, top = place[token], max(each.logprob for each in place.values())
            ahead = sum(math.exp(p.logprob) for p in place.values() if p.rank < mine.rank)
            assert mine.rank <= own.get("top_k", math.inf)
            assert ahead < own.get("top_p", 2.0) + 1e-3
            least = own["temperature"] * math.log(own.get("min_p", 1e-9))
            assert mine.logprob - top > least - 1e-3
            ranks.append(mine.rank)
    assert len(set(ranks)) > 3, "it draws"


def test_a_seed_draws_the_same_alone_and_among_others(tiny: str) -> None:
    prompts = make_prompts()[:12]
    params = [
        SamplingParams(temperature=2.0, seed=i, max_tokens=16, ignore_eos=True, **controls)
        for i, controls in enumerate(
            [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.02}, {"frequency_penalty": 0.8},
             {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}] * 2
        )
    ]  # fmt: skip
    with LLM(tiny, **SMALL) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        pairs = zip(prompts, params, strict=True)
        alone = [llm.generate(*pair, use_tqdm=False)[0] for pair in pairs]
    assert [o["token_ids"] for o in together] == [o["token_ids"] for o in alone]


def test_guided_requests_beside_others(tiny: str) -> None:
    pytest.importorskip("llguidance")
    guided = SamplingParams(temperature=1.0, structured_outputs=FORM)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=schema)
    as_json = SamplingParams(temperature=1.0, max_tokens=400, structured_outputs=form)
    plain = SamplingParams(temperature=0, max_tokens=12)
    with LLM(tiny, **SMALL) as llm:
        outputs = llm.generate(
            ["127+345="] * 60, [guided, as_json, plain] * 20, use_tqdm=False
        )  # fmt: skip
        assert llm.metrics()["overlap"]
    texts = [output["text"] for output in outputs]
    assert all(len(t) == 7 and set(t[:3]) <= set("abcdef") and t[3:].isdigit() for t in texts[::3])
    assert all(json.loads(text)["a"] in (1, 22) for text in texts[1::3])
    assert set(texts[2::3]) == {"472"}


def test_embeddings_and_scores(tiny: str) -> None:
    prompts = make_prompts()[:10]
    found: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        with LLM(tiny, device=device, max_num_batched_tokens=64, **SMALL) as llm:
            vectors = [
                [o.outputs.embedding for o in llm.embed(prompts, pooling, use_tqdm=False)]
                for pooling in ("last", "mean")
            ]
            scores = [o.total_logprob for o in llm.score(prompts, use_tqdm=False)]
        found[device] = torch.tensor(vectors), torch.tensor(scores)
    for mine, wanted in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("overlap", [True, False])
def test_sampling_masks_of_few_tokens_and_of_many(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They travel as ids, or as bits beside the step after. PyTorch finds the same."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    filters: list[dict[str, Any]] = [
        *({"top_k": top_k} for top_k in (1, 50, 254, 255, 256, 257, 9000)),
        *({"top_p": 0.3}, {"top_p": 0.9}, {"min_p": 0.2}, {"allowed_token_ids": [0, 151935]}),
        {"logit_bias": {7: 1.0}},
    ]
    common = {"temperature": 0.8, "max_tokens": 9, "ignore_eos": True, "return_sampling_mask": True}
    params = [SamplingParams(**common, seed=i, **own) for i, own in enumerate(filters * 4)]
    options = {"load_format": "dummy", "batch_invariant": True, "max_model_len": 256}
    options |= {"num_kvcache_blocks": 64, "max_num_seqs": 64, "enable_prefix_caching": False}
    num_fetched = []
    copy = extra_results.rows_to_host

    def spy(words: Any, rows: Any) -> Any:
        num_fetched.append(len(rows))
        return copy(words, rows)

    monkeypatch.setattr(extra_results, "rows_to_host", spy)
    found = []
    with LLM(tmp_path, overlap=overlap, **options) as llm:
        for runs in (reporting.runs_kernels, lambda logits: False):
            monkeypatch.setattr(reporting, "runs_kernels", runs)
            outputs = llm.generate([[i, 5] for i in range(len(params))], params, use_tqdm=False)
            found.append([(o["token_ids"], list(o.outputs[0].sampling_mask)) for o in outputs])
            assert 0 < sum(num_fetched) < 9 * len(params)
            num_fetched.clear()
    assert found[0] == found[1]
    for i, (token_ids, masks) in enumerate(found[0]):
        own = filters[i % len(filters)]
        for token, mask in zip(token_ids, masks, strict=True):
            assert mask is None if "logit_bias" in own else token in mask
            assert "top_k" not in own or len(mask) >= own["top_k"]
            assert "allowed_token_ids" not in own or mask == [0, 151935]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("options", [{}, {"disable_custom_all_reduce": True}], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_controls_on_several_gpus(size: int, options: dict[str, Any], tiny: str) -> None:
    """Rank 0 has the controls, all have the tokens; grammars wait for tokens in between."""
    wanted = results(model=tiny, device="cpu")
    found = results(model=tiny, tensor_parallel_size=size, max_num_batched_tokens=64, **options)
    assert_same(found, wanted)
    pytest.importorskip("llguidance")
    guided = SamplingParams(temperature=1.0, structured_outputs=FORM)
    with LLM(tiny, tensor_parallel_size=size, **SMALL, **options) as llm:
        outputs = llm.generate(["127+345="] * 30, guided, use_tqdm=False)
        assert all(len(output["text"]) == 7 for output in outputs)
        assert llm.score("127+345=", use_tqdm=False)[0].total_logprob < 0
