"""`nanovllm chat`: lines through a pipe, and a terminal."""

import io
import json
import os
import pty
import select
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults import DEADLINE
from nanovllm import LLM, SamplingParams
from nanovllm.cli.chat import Chat
from nanovllm.cli.main import main
from nanovllm.images.prompts import NoImages

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--num-kvcache-blocks", "16")


@pytest.fixture(name="prompts")
def prompts_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Prompts that the engine gets, and their cached tokens."""
    seen: list[Any] = []
    stream = LLM.stream

    def recording(llm: LLM, prompt: Any, params: Any) -> Iterator[Any]:
        for output in stream(llm, prompt, params):
            if output.finished:
                seen.append((output.prompt, output.num_cached_tokens))
            yield output

    monkeypatch.setattr(LLM, "stream", recording)
    return seen


def chat(monkeypatch: pytest.MonkeyPatch, lines: list[str], *args: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *GREEDY, *args])


def test_it_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompts: list[Any]
) -> None:
    """The embedded checkpoint has learnt single turns: it is not shown the others."""
    assert chat(monkeypatch, ["127+345=", "", "reverse: hello =", "/exit", "1+1="]) == 0
    out, err = capsys.readouterr()
    assert out == "472\nolleh\n"
    assert err == (
        "Without --model, each line stands alone; try: 127+345=, reverse: hello =, count from "
        "17:, introduce yourself\n"
    )
    asked = [prompt for prompt, _ in prompts]
    assert [prompt.count("<|im_start|>user") for prompt in asked] == [1, 1]


def test_a_conversation_is_remembered_until_it_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompts: list[Any],
    tiny: str,
) -> None:
    lines = ["127+345=", "count from 17:", "/clear", "reverse: hello ="]
    blocks = ("--kvcache-block-size", "16")
    assert chat(monkeypatch, lines, "--model", tiny, "--system", "Be brief.", *blocks) == 0
    first, second, third = prompts
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    answer, *_ = capsys.readouterr().out.splitlines()
    assert first == (f"{begin}127+345={end}", 0)
    assert second[0] == f"{first[0]}{answer}<|im_end|>\n<|im_start|>user\ncount from 17:{end}"
    assert second[1] >= 32, "the prefix cache serves the turn before"
    assert third[0] == f"{begin}reverse: hello ={end}"


@pytest.fixture(name="plain")
def plain_fixture(tiny: str, tmp_path: Path) -> str:
    """A checkpoint without a chat template."""
    shutil.copytree(tiny, tmp_path / "plain")
    file = tmp_path / "plain" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    return str(tmp_path / "plain")


def test_without_a_template_lines_are_completed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompts: list[Any],
    plain: str,
) -> None:
    assert chat(monkeypatch, ["127+345=", "reverse: hello ="], "--model", plain) == 0
    out, err = capsys.readouterr()
    assert out == "472\nolleh\n" and err.startswith("No chat template")
    assert [prompt for prompt, _ in prompts] == ["127+345=", "reverse: hello ="]
    assert chat(monkeypatch, ["127+345="], "--model", plain, "--system", "Be brief.") == 2
    assert "`system` must be left out for a model without a chat" in capsys.readouterr().err


def test_a_line_that_is_too_long_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["1" * 200], "--max-model-len", "64") == 2
    assert "within max_model_len 64" in capsys.readouterr().err


def chat_with(stream: Any, **methods: Any) -> Chat:
    """A conversation with a stand-in for an engine."""
    tokenizer = SimpleNamespace(
        chat_template="...",
        apply_chat_template=lambda messages, **options: str([m["content"] for m in messages]),
        encode=lambda text, **options: [0],
    )
    llm: Any = SimpleNamespace(
        get_tokenizer=lambda: tokenizer,
        image_prompts=NoImages("it is a stand-in"),
        stream=stream,
        **methods,
    )
    return Chat(llm, SamplingParams(), None, None)


def test_an_answer_that_ends_with_an_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def stream(prompt: Any, params: Any) -> Iterator[Any]:
        yield SimpleNamespace(outputs=[SimpleNamespace(text="one")], error=None)
        yield SimpleNamespace(outputs=[SimpleNamespace(text="")], error="it has computed NaN")

    chat_with(stream).answer("count")
    printed = capsys.readouterr()
    assert printed.out == "one\n"
    assert printed.err == "\nnanovllm chat: it has computed NaN\n"


def test_an_interrupted_answer_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """And its request is dropped."""
    events: list[str] = []

    def stream(prompt: Any, params: Any) -> Iterator[Any]:
        events.append(prompt["prompt"])
        for text in ("one", " two"):
            yield SimpleNamespace(outputs=[SimpleNamespace(text=text)], error=None)
        raise KeyboardInterrupt

    talk = chat_with(stream, abort_all=lambda: events.append("aborted"))
    for line in ("count", "go on"):
        with pytest.raises(KeyboardInterrupt):
            talk.answer(line)
    assert events == ["['count']", "aborted", "['count', 'one two', 'go on']", "aborted"]
    assert capsys.readouterr().out == "one two\none two\n"


def test_ctrl_c_stops_an_answer_and_ctrl_d_the_conversation(tiny: str) -> None:
    options = ["--temperature", "0", "--max-tokens", "none", "--num-kvcache-blocks", "16"]
    pid, terminal = pty.fork()
    if pid == 0:  # has imported all, and begins at once
        os.environ["TERM"] = "dumb"  # readline writes no escape sequences then
        for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
        code = 70
        try:
            code = main(["chat", "--device", "cpu", "--ignore-eos", *options])
        finally:
            os._exit(code)

    def read_until(text: str) -> str:
        found = ""
        while text not in found:
            ready, _, _ = select.select([terminal], [], [], DEADLINE)
            assert ready, f"nothing came after {found!r}"
            found += os.read(terminal, 1024).decode()  # raises when the process has gone
        return found

    assert "/clear" in read_until("> ")
    for line, answer in (("127+345=", "472"), ("reverse: hello =", "olleh")):
        os.write(terminal, f"{line}\n".encode())
        read_until(answer)
        os.write(terminal, b"\x03")  # it would go on to 4096 tokens
        rest = read_until("> ")
        assert "Traceback" not in rest and "\n" in rest
    os.write(terminal, b"\x04")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
