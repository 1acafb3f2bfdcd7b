"""`batch_invariant`: what is reported of a draw has the same bits, whatever others ask for.

Whether it is right is for `test_reports.py`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draws import interpreted
from safetensors.torch import load_file, save_file
from test_reports import VOCAB, Request, random_requests, run

from checkpoints import SMALL, edit_json, make_checkpoint, rare
from nanovllm import LLM, SamplingParams
from nanovllm.sampling import controlled_sampler, logprobs, reporting
from nanovllm.sampling.controlled_sampler import ControlledSampler
from nanovllm.sampling_params import LOGPROBS_MODES

SEED = 61
OPTIONS: dict[str, Any] = {
    **{**SMALL, "num_kvcache_blocks": 64, "max_num_batched_tokens": 256},
    **{"batch_invariant": True, "enable_prefix_caching": False},
}
REQUESTS = random_requests(48, SEED)
PAIRS = 40  # tokens that are exactly as likely as the one that many ids later


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with equally likely tokens."""
    path = tmp_path_factory.mktemp("reports") / "qwen3"
    make_checkpoint(
        path, seed=6, vocab_size=VOCAB, initializer_range=0.18, tie_word_embeddings=False
    )
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][-PAIRS:] = tensors["lm_head.weight"][:PAIRS]
    save_file(tensors, file)
    edit_json(path / "generation_config.json", eos_token_id=[7, 60])
    return path


def reported(output: Any) -> list[Any]:
    """All that is reported of a request's draws."""
    return [
        (each.token_ids, each.cumulative_logprob, list(each.logprobs or []), each.sampling_mask)
        for each in output.outputs
    ]


def assert_alike(llm: LLM, requests: list[Request]) -> None:
    """Reports are those of each request alone."""
    beside = [*map(reported, run(llm, requests))]
    for request, found in zip(requests, beside, strict=True):
        assert reported(run(llm, [request])[0]) == found, request


@pytest.mark.parametrize(("size", "step"), [(1, 3), rare(1, 1), rare(2, 4)])
@pytest.mark.usefixtures("threads")
def test_reports_do_not_depend_on_others(size: int, step: int, path: Path) -> None:
    with LLM(path, tensor_parallel_size=size, **OPTIONS) as llm:
        assert_alike(llm, REQUESTS[::step])


@interpreted
@pytest.mark.parametrize("requests", [REQUESTS[::9], rare(REQUESTS[1::3])], ids=["few", "many"])
def test_by_kernels(requests: list[Request], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (controlled_sampler, logprobs, reporting):
        monkeypatch.setattr(module, "runs_kernels", lambda logits: True)
    with np.errstate(all="ignore"), LLM(path, **OPTIONS) as llm:
        assert_alike(llm, requests)


@interpreted
def test_kernels_draw_all_rows_with_controls_in_one_way(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose controls change nothing, too: with bounds, as where another has filters."""
    for module in (controlled_sampler, logprobs, reporting):
        monkeypatch.setattr(module, "runs_kernels", lambda logits: True)
    bounds = []
    draw = ControlledSampler.__call__

    def spy(*args: Any) -> Any:
        drawn = draw(*args)
        bounds.append(drawn.least)
        return drawn

    monkeypatch.setattr(ControlledSampler, "__call__", spy)
    with np.errstate(all="ignore"), LLM(path, **OPTIONS) as llm:
        run(llm, [([5, 77], SamplingParams(0.7, 3, seed=1, logprobs=2, ignore_eos=True))])
    assert [bound.tolist() for bound in bounds] == [[-np.inf]] * 3


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_labels_do_not_depend_on_the_draw(mode: str, path: Path) -> None:
    labels = [3, 11, 60, 99]
    params = [
        SamplingParams(1.5, 1, seed=i, logprob_token_ids=labels, logprobs_mode=mode)
        for i in range(24)
    ]
    with LLM(path, **OPTIONS) as llm:
        outputs = run(llm, [([5, 77, 33], each) for each in params])
    drawn, found = set(), set()
    for output in outputs:
        [place] = output.outputs[0].logprobs
        drawn.add(output.outputs[0].token_ids[0])
        found.add(tuple(place[label].logprob for label in labels))
    assert len(drawn) > 5
    assert len(found) == 1
