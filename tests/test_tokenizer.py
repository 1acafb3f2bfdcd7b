"""Loading the checkpoint's tokenizer."""

import linecache
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from faults import DEADLINE, wait_until
from nanovllm.utils.tokenizer import load_tokenizer

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
    whole.AutoTokenizer = SimpleNamespace(from_pretrained=Path)
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
