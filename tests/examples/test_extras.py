"""The notebook and the examples that need packages of their own; .ci/run installs them."""

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ROOT, SCRIPTS, SECONDS, SETTINGS, Runner, environment

from faults import wait_until
from nanovllm import LLM, TINY, AsyncLLM, SamplingParams

INSTALL = 'not installed: pip install ".[{}]"'


# -- lm_eval_harness.py -------------------------------------------------------------------------


@pytest.fixture(name="adapted", scope="module")
def adapted_fixture() -> Iterator[Any]:
    """The module with its adapter."""
    pytest.importorskip("lm_eval", reason=INSTALL.format("lm-eval"))
    sys.path.insert(0, str(ROOT / "examples"))
    import lm_eval_harness

    yield lm_eval_harness
    sys.path.remove(str(ROOT / "examples"))


def asked(*arguments: tuple[Any, ...]) -> list[Any]:
    """Requests of the harness."""
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, args, i) for i, args in enumerate(arguments)]


@pytest.mark.slow
def test_the_harness_finds_the_right_sums(adapted: Any, tmp_path: Path) -> None:
    runner = Runner()
    table = runner("lm_eval_harness", directory=tmp_path)
    runner.close()
    [line] = re.findall(r"^\|sums .*$", table, re.M)
    _, task, _, _, num_fewshot, metric, _, value, *_ = (cell.strip() for cell in line.split("|"))
    assert (task, num_fewshot, metric) == ("sums", "0", "acc")
    assert float(value) > 0.97, "the checkpoint has learnt to add"


@pytest.mark.slow  # the harness takes seconds to import
def test_the_adapter_agrees_with_transformers(adapted: Any, reference: Any) -> None:
    """Also of texts that are empty, or longer than the model can see."""
    longest = 63

    def logprobs(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each token but the first, and whether it is the likeliest."""
        with torch.no_grad():
            logits = reference(torch.tensor(ids)[None]).logits[0, :-1].double()  # [T - 1, V]
        found = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return found, logits.argmax(-1) == torch.tensor(ids[1:])

    with LLM(TINY, max_model_len=longest + 1, device="cpu") as llm:
        adapter = adapted.Adapter(llm)
        end = llm.get_tokenizer().eos_token_id
        pairs = [("127+345=", "472"), ("127+345=", "471"), ("", "472"), ("9," * 50, "8,7")]
        for (context, answer), (total, is_greedy) in zip(
            pairs, adapter.loglikelihood(asked(*pairs), disable_tqdm=True), strict=True
        ):
            ids = [*context.encode(), *answer.encode()] if context else [end, *answer.encode()]
            expected, best = logprobs(ids[-longest:])
            assert total == pytest.approx(expected[-len(answer) :].sum().item(), abs=1e-3)
            assert is_greedy == best[-len(answer) :].all()

        text = " ".join(map(str, range(60)))
        ids = [end, *text.encode()]
        first, _ = logprobs(ids[:longest])
        rolled = first.sum().item()
        for begin in range(longest, len(ids), longest - 1):  # the last is as long as the others
            stop = min(begin + longest - 1, len(ids))
            piece, _ = logprobs(ids[stop - longest : stop])
            rolled += piece[-(stop - begin) :].sum().item()
        assert len(ids) > 2 * longest
        found = adapter.loglikelihood_rolling(asked((text,), ("472",)))
        assert found[0] == pytest.approx(rolled, abs=1e-2)
        assert found[1] == pytest.approx(logprobs([end, *b"472"])[0].sum().item(), abs=1e-3)


@pytest.mark.slow
def test_the_adapter_generates_until(adapted: Any) -> None:
    with LLM(TINY, max_model_len=100, device="cpu") as llm:
        adapter = adapted.Adapter(llm)
        count = "count from 17:"
        texts = adapter.generate_until(
            asked(
                (count, {"until": ["\n"], "max_gen_toks": 60}),
                (count, {"until": "21"}),
                (count, {"until": [" 25", "22"], "do_sample": False, "temperature": 9.0}),
                (count, {"max_gen_toks": 5}),
                ("9" * 200 + count, {"until": ["\n"], "max_gen_toks": 40}),
            )
        )
        drawn = adapter.generate_until(asked(*[(count, {"temperature": 9.0})] * 4))
    whole = " ".join(map(str, range(18, 38)))
    assert texts[:4] == [whole, whole[: whole.index("21")], whole[: whole.index("22")], whole[:5]]
    assert 0 < len(texts[4]) <= 40
    assert len({*drawn}) == 4


@pytest.mark.slow
def test_the_page_adapts_conversations(adapted: Any) -> None:
    page = (ROOT / "docs/tasks/lm_eval_harness.md").read_text("utf-8")
    [block] = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(block, "lm_eval_harness.md", "exec"), names)
    with LLM(TINY, device="cpu") as llm:
        found = adapted.simple_evaluate(
            names["ChatAdapter"](llm),
            tasks=[adapted.TASK],
            apply_chat_template=True,
            task_manager=adapted.tasks.TaskManager(include_defaults=False),
            limit=50,
        )
    assert found["results"]["sums"]["acc,none"] > 0.9
    prompt, _ = found["samples"]["sums"][0]["arguments"][0]
    assert prompt == "<|im_start|>user\n99+218=<|im_end|>\n<|im_start|>assistant\n"


# -- web_stream.py ------------------------------------------------------------------------------


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve the app in a thread of this process; yields its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_readers_who_leave_abort_their_request() -> None:
    """One whose answer would be long; another goes on."""
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package, reason=INSTALL.format("examples"))
    import httpx

    make_app = runpy.run_path(str(SCRIPTS["web_stream"]))["make_app"]
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    llm = AsyncLLM(TINY, device="cpu")
    try:
        with serving(make_app(llm, endless)) as url, httpx.Client(base_url=url) as client:

            def metric(name: str) -> int:
                return client.get("/metrics").json()[name]

            def ask() -> Any:
                return client.stream("POST", "/stream", content="count from 17:")

            with ask() as stays:
                come = stays.iter_text()
                next(come)
                with ask() as leaves:
                    text = leaves.iter_text()
                    assert next(text)
                    assert metric("num_aborted") == 0
                wait_until(lambda: metric("num_aborted") == 1)
                assert next(come)
            wait_until(lambda: metric("num_aborted") == 2)
            assert metric("num_finished") == metric("num_used_kvcache_blocks") == 0
    finally:
        llm.exit()


@pytest.mark.slow
def test_the_server_as_users_start_it(tmp_path: Path) -> None:
    """The page, an answer in many pieces, a refusal in words, and an end by Ctrl-C."""
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package, reason=INSTALL.format("examples"))
    import httpx

    command = [sys.executable, str(SCRIPTS["web_stream"]), "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            heard = iter(process.stderr.readline, "")
            url = next(found[0] for line in heard if (found := re.search(r"http://[\d.:]+", line)))
            with httpx.Client(base_url=url, timeout=60) as client:
                page = client.get("/")
                assert page.headers["content-type"].startswith("text/html")
                assert page.text == SCRIPTS["web_stream"].with_suffix(".html").read_text("utf-8")
                with client.stream("POST", "/stream", content="count from 17:") as answer:
                    pieces = [*answer.iter_text()]
                assert "".join(pieces) == " ".join(map(str, range(18, 38)))
                assert len(pieces) > 10
                long = client.post("/stream", content="9" * 5000)
                assert long.status_code == 400 and "max_model_len" in long.text
                assert client.get("/metrics").json()["num_finished"] == 1
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0


# -- quickstart.ipynb ---------------------------------------------------------------------------


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells print the stored outputs; times are in pictures alone."""
    for package in ("nbclient", "ipykernel", "matplotlib", "pandas"):
        pytest.importorskip(package, reason=INSTALL.format("examples"))
    import nbformat
    from nbclient import NotebookClient

    for name in {*os.environ} - {*environment()}:
        monkeypatch.delenv(name)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    path = ROOT / "examples" / "quickstart.ipynb"
    stored = path.read_text("utf-8")
    assert len(stored) < 500_000 and str(ROOT) not in stored
    notebook = nbformat.reads(stored, 4)
    shown = [outputs(cell) for cell in notebook.cells]
    place = tmp_path / "examples"  # as in a clone: a cell runs a script of it
    place.mkdir()
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    where = {"metadata": {"path": str(place)}}
    NotebookClient(notebook, kernel_name="python3", timeout=SECONDS, resources=where).execute()
    assert [outputs(cell) for cell in notebook.cells] == shown
    kinds = [kind for cell in shown for kind, _ in cell]
    assert kinds.count("image/png") == 4 and kinds.count("text/html") == 2
    assert "stderr" not in kinds, "no warnings"


def outputs(cell: Any) -> list[tuple[str, str]]:
    """Outputs of a cell: kinds, and text that is the same on each machine. How a stream is cut into
    messages depends on the time.
    """
    found: list[tuple[str, str]] = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            before = found.pop()[1] if found and found[-1][0] == output.name else ""
            found.append((output.name, before + output.text))
        else:
            assert output.output_type in ("display_data", "execute_result"), output
            found += [(kind, "") for kind in sorted(output.data)]
    return found
