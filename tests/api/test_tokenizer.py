"""Loading the checkpoint's tokenizer."""

import io
import json
import linecache
import logging
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from checkpoints import SMALL, TINY, copy_checkpoint, edit_json, greedy
from faults import DEADLINE, wait_until
from nanovllm import LLM
from nanovllm.checkpoint import tokenizer
from nanovllm.checkpoint.tokenizer import load_tokenizer

IMPORT = "import sys; sys.import_transformers()"


def test_two_threads_import_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers replaces its module at the end of its import. Who had got hold of the first one
    found nothing in it, and one of two engines that were built at once failed.
    """
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "transformers.py").write_text(IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    del sys.modules["transformers"]
    whole: Any = ModuleType("transformers")
    whole.AutoTokenizer = SimpleNamespace(from_pretrained=lambda model, **options: Path(model))
    whole.PreTrainedTokenizerFast = None
    others: list[Future[Path]] = []
    threads: list[int] = []

    def load() -> Path:
        threads.append(threading.get_ident())
        return load_tokenizer(str(tmp_path))

    def is_at_the_import() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[threads[0]]) if threads else ()
        ours = [(f, line) for f, line in stack if f.f_code is load_tokenizer.__code__]
        return any("import" in linecache.getline(f.f_code.co_filename, line) for f, line in ours)

    with ThreadPoolExecutor(1) as pool:

        def import_transformers() -> None:
            others.append(pool.submit(load))
            wait_until(is_at_the_import)
            sys.modules["transformers"] = whole

        monkeypatch.setattr(sys, "import_transformers", import_transformers, raising=False)
        assert load_tokenizer(str(tmp_path)) == tmp_path
        assert others[0].result(DEADLINE) == tmp_path


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory for marks of a checkpoint's code. At the end there is none, nobody has read the
    "y" on standard input, and nobody has looked for another machine.
    """
    calls: list[Any] = []

    def refuse(*args: Any) -> None:
        calls.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    yield tmp_path / "mark"
    assert sys.stdin.tell() == 0, "asked whether to run it"
    assert not calls
    assert not (tmp_path / "mark").exists(), "run"


def with_own_code(path: Path, mark: Path, files: Iterable[str], reference: str) -> Path:
    """The embedded checkpoint with classes of its own, which transformers does not know."""
    copy_checkpoint(TINY, path, model_type="mine")
    (path / "mine.py").write_text(f"open({str(mark)!r}, 'w'); from transformers import *")
    if "tokenizer_config.json" in files:
        edit_json(path / "tokenizer_config.json", tokenizer_class="MyTokenizer")
    auto_map = {"AutoConfig": f"{reference}Config", "AutoTokenizer": [None, f"{reference}Tok"]}
    for file in files:
        edit_json(path / file, auto_map=auto_map)
    return path


CONFIGS = ("config.json", "tokenizer_config.json")


@pytest.mark.parametrize(("installed", "helps"), [("5.17.0", True), ("5.24.0", False)])
@pytest.mark.parametrize("slow", [0, 3600])
def test_a_slow_import_says_what_makes_it_fast(
    slow: float,
    installed: str,
    helps: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tokenizer, "SLOW", slow)
    monkeypatch.setattr(tokenizer, "version", lambda name: installed)
    with caplog.at_level(logging.INFO, "nanovllm"):
        load_tokenizer(TINY)
    assert (f"transformers {installed} imported in" in caplog.text) == (not slow)
    assert ("5.24 needs less" in caplog.text) == (helps and not slow)


@pytest.mark.parametrize("reference", ["mine.", "other/repository--mine."])
@pytest.mark.parametrize(
    "files", [CONFIGS[:1], CONFIGS[1:], CONFIGS], ids=["config", "own", "both"]
)
def test_code_of_a_checkpoint_is_not_run(
    files: tuple[str, ...], reference: str, tmp_path: Path, outside: Path
) -> None:
    """transformers asked on standard input, and "y", from a pipe, ran it."""
    path = with_own_code(tmp_path / "model", outside, files, reference)
    outputs = []
    for model in (path, TINY):
        with LLM(model, **SMALL) as llm:
            outputs += llm.generate(["Hello, you!"], greedy(9), use_tqdm=False)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text


@pytest.mark.parametrize("reference", ["mine.", "other/repository--mine."])
def test_tokenizer_that_only_its_own_code_can_load(
    reference: str, tmp_path: Path, outside: Path
) -> None:
    path = with_own_code(tmp_path / "model", outside, CONFIGS, reference)
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=r"`auto_map`.*`trust_remote_code`.*tokenizer\.json"):
        LLM(path, **SMALL)
