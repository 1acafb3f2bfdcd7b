"""lm-evaluation-harness over HTTP, as its users run it (`pip install "lm-eval[api]"`)."""

from pathlib import Path

import pytest
from http_server import serving

from nanovllm import LLM, TINY

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow  # the harness takes seconds to import
@pytest.mark.parametrize("batch_size", [1, 16])
def test_scores_are_those_of_the_library_s_own_adapter(batch_size, monkeypatch):
    """`local-completions` reads log-probabilities of echoed prompts, of each answer of a task."""
    for package in ("lm_eval", "aiohttp", "tenacity"):
        pytest.importorskip(package, reason='needs pip install "lm-eval[api]"')
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import lm_eval_harness as own
    from lm_eval import simple_evaluate, tasks

    def run(model, **options):
        manager = tasks.TaskManager(include_defaults=False)
        found = simple_evaluate(
            model, tasks=[own.TASK], task_manager=manager, limit=40, log_samples=True, **options
        )
        scores = [
            float(value)
            for sample in sorted(found["samples"]["sums"], key=lambda each: each["doc_id"])
            for [(value, _)] in sample["resps"]
        ]
        greedy = [
            str(is_greedy)
            for sample in sorted(found["samples"]["sums"], key=lambda each: each["doc_id"])
            for [(_, is_greedy)] in sample["resps"]
        ]
        results = found["results"]["sums"]
        return scores, greedy, {key: results[key] for key in results if key.startswith("acc")}

    with LLM(TINY, max_model_len=None) as llm:
        scores, greedy, results = run(own.Adapter(llm))
    with serving(names=(TINY,)) as place:
        arguments = {
            "model": TINY,
            "base_url": f"{place.url}/v1/completions",
            "num_concurrent": 1,
            "tokenized_requests": True,
        }
        found = run("local-completions", model_args=arguments, batch_size=batch_size)
    assert len(scores) == 3 * 40 and results["acc,none"] > 0.9
    assert {*greedy} == {"True", "False"}
    assert found[0] == pytest.approx(scores, abs=1e-4)
    assert found[1:] == (greedy, results)
