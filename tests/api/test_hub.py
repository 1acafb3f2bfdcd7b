"""Models by their names: a hub on a local port, its cache, and what each failure says."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from checkpoints import PROMPT, SMALL, TINY, make_checkpoint, reference
from nanovllm.checkpoint.hub import checkpoint_directory, checkpoint_name

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_ours"


class Hub(ThreadingHTTPServer):
    """The files of one model, at /our/model; /our/gated needs a token.

    Attributes:
        requests: paths that were asked for.
        breaks: files end in their middle.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests, self.breaks = files, list[str](), False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].lstrip("/")
        self.server.requests.append(path)
        is_api = path.startswith("api/models/")
        owner, name, *rest = path.removeprefix("api/models/").split("/")
        if (owner, name) not in (("our", "model"), ("our", "gated")):
            return self.answer(404, {"X-Error-Code": "RepoNotFound"})
        if name == "gated" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(403, {"X-Error-Code": "GatedRepo"})
        if not is_api:
            return self.file("/".join(rest[2:]))
        if rest[:1] == ["revision"] and rest[1:] not in (["main"], ["v1"], [SHA]):
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        if rest[:1] == ["tree"]:
            found: Any = [
                {"type": "file", "path": path, "size": len(data), "oid": self.oid(data)}
                for path, data in self.server.files.items()
            ]
        else:
            siblings = [{"rfilename": path} for path in self.server.files]
            found = {"id": f"{owner}/{name}", "sha": SHA, "siblings": siblings}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def file(self, path: str) -> None:
        data = self.server.files.get(path)
        if data is None:
            return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})
        self.answer(200, {"ETag": f'"{self.oid(data)}"', "X-Repo-Commit": SHA}, data)

    def body(self, body: bytes) -> None:
        if self.server.breaks and not self.path.startswith("/api/"):
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)

    def oid(self, data: bytes) -> str:
        return hashlib.sha1(data, usedforsecurity=False).hexdigest()

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.body(body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hub") / "model", shard="100KB")


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 1, "an index decides"
    files |= {"tokenizer.json": (TINY / "tokenizer.json").read_bytes()}
    files |= dict.fromkeys(("pytorch_model.bin", "consolidated.safetensors"), b"not wanted")
    files |= {"onnx/model.safetensors": b"not wanted", "model.gguf": b"not wanted"}
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(home: Path, url: str, code: str, **env: str) -> list[str]:
    """Output of a new process with its hub at `url` and its cache in `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    command = [sys.executable, "-c", code]
    process = subprocess.run(
        command, env={**kept, **settings}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.splitlines()


FIND = """
import sys, traceback
from nanovllm.checkpoint.hub import checkpoint_directory
for name, revision in {calls!r}:
    try:
        print(checkpoint_directory(name, revision))
    except ValueError as error:
        print("ValueError:", error)
        shown = "".join(traceback.format_exception(error))
        assert "huggingface_hub/" not in shown and "httpx/" not in shown, shown
assert "torch" not in sys.modules
"""


def test_a_model_by_its_name(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Downloaded with the files that are needed, then taken from the cache, hub or not."""
    options = {name: value for name, value in SMALL.items() if name != "device"}
    code = f"""
from nanovllm import LLM, SamplingParams
with LLM("our/model", device="cpu", **{options!r}) as llm:
    print(llm.config.model)
    [out] = llm.generate([{PROMPT}], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    print(out.outputs[0].token_ids)
"""
    directory, tokens = ask(tmp_path, hub.url, code)
    assert tokens == str(reference(model, PROMPT, 6))
    assert sorted(path.name for path in Path(directory).iterdir()) == sorted(
        name for name in hub.files if hub.files[name] != b"not wanted"
    )
    assert hub.requests
    hub.requests.clear()
    find = FIND.format(calls=[("our/model", None), ("our/model", "main"), ("our/model", SHA)])
    offline = ask(tmp_path, "http://127.0.0.1:9", find, HF_HUB_OFFLINE="1")
    assert offline == [directory] * 3
    shard = next(path for path in Path(directory).glob("*.safetensors"))
    # First the cache is enough; then a download has been cut off.
    cut = f"""
import os, urllib.request
urllib.request.urlopen("{hub.url}/our/model/x/x/config.json").close()
os.unlink({str(shard)!r})
"""
    assert ask(tmp_path, hub.url, find + cut + find) == [directory] * 6
    first, *downloads = hub.requests
    assert first == "our/model/x/x/config.json" and downloads and shard.is_file()


FIND_ADAPTER = """
import sys
from nanovllm.checkpoint.hub import adapter_directory
for name in {names!r}:
    try:
        print(adapter_directory(name))
    except ValueError as error:
        print("ValueError:", error)
assert "torch" not in sys.modules
"""


def test_an_adapter_by_its_name(hub: Hub, tmp_path: Path) -> None:
    """Its two files are downloaded, not those of its training, then taken from the cache."""
    hub.files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"}
    wanted = {*hub.files}
    hub.files |= {
        "tokenizer.json": b"{}",
        "optimizer.pt": b"",
        "checkpoint-5/adapter_config.json": b"",
    }
    find = FIND_ADAPTER.format(names=["our/model", "our/none", "our model"])
    directory, none, neither = ask(tmp_path, hub.url, find)
    assert {path.name for path in Path(directory).iterdir()} == wanted
    assert none.startswith("ValueError: `adapter` 'our/none' is not available: the hub has no such")
    assert neither == (
        "ValueError: `adapter` must be the directory of a PEFT adapter or a name on the hub like "
        "owner/name, and 'our model' is neither"
    )
    find = FIND_ADAPTER.format(names=["our/model", "our/other"])
    offline = ask(tmp_path, "http://127.0.0.1:9", find, HF_HUB_OFFLINE="1")
    assert offline[0] == directory and "unset it, or pass the directory of a PEFT" in offline[1]
    (Path(directory) / "adapter_model.safetensors").unlink()  # a download that was cut off
    assert ask(tmp_path, hub.url, find)[0] == directory
    assert (Path(directory) / "adapter_model.safetensors").is_file()


def test_an_unavailable_model_gets_a_reason_and_a_remedy(hub: Hub, tmp_path: Path) -> None:
    calls = [("our/gated", None), ("our/none", None), ("our/model", "v7"), ("our/model", "v1")]
    gated, none, revision, found = ask(tmp_path, hub.url, FIND.format(calls=calls))
    assert gated == (
        "ValueError: `model` 'our/gated' is not available: it is gated; accept its terms on "
        f"{hub.url}/our/gated, and set HF_TOKEN to a token of yours"
    )
    assert none == (
        "ValueError: `model` 'our/none' is not available: the hub has no such repository, or it is "
        "private; correct the name, or set HF_TOKEN to a token with access to it"
    )
    assert "has no revision 'v7'" in revision and f"see {hub.url}/our/model" in revision
    assert found.endswith(SHA)
    [gated] = ask(tmp_path, hub.url, FIND.format(calls=calls[:1]), HF_TOKEN=TOKEN)
    assert gated.endswith(SHA)
    find = FIND.format(calls=[("our/other", None)])
    [offline] = ask(tmp_path, hub.url, find, HF_HUB_OFFLINE="1")
    assert "it is not in the cache" in offline and "HF_HUB_OFFLINE is set; unset it" in offline
    [down] = ask(tmp_path, "http://127.0.0.1:9", find)
    assert "try again, or pass the directory of a checkpoint" in down


@pytest.mark.parametrize(
    "name", ["model", "a/b/c", "our/model:v1", "", "~/model", "./model", "../model", "a--b/c"]
)
def test_what_is_no_name_is_no_directory(name: str) -> None:
    with pytest.raises(ValueError, match=r"a name on the hub like .*, and '.*' is neither"):
        checkpoint_directory(name, None)


def test_a_file_of_weights_is_no_model() -> None:
    with pytest.raises(
        ValueError, match=r"'our/model\.gguf' is a GGUF file, which is not supported"
    ):
        checkpoint_directory("our/model.gguf", None)


@pytest.mark.slow  # the hub's library tries again, and waits
def test_a_download_that_breaks_says_so(hub: Hub, tmp_path: Path) -> None:
    """The hub ends each file in its middle."""
    hub.breaks = True
    [broken] = ask(tmp_path, hub.url, FIND.format(calls=[("our/model", None)]))
    assert "'our/model' is not available: " in broken
    assert "try again, or pass the directory of a checkpoint" in broken
    hub.breaks = False
    [found] = ask(tmp_path, hub.url, FIND.format(calls=[("our/model", None)]))
    assert found.endswith(SHA)


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`revision` is for names on the hub.*leave it out"):
        checkpoint_directory(str(tmp_path), "main")
    assert checkpoint_directory(str(tmp_path), None) == str(tmp_path)


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        (f"/hub/models--our--model/snapshots/{SHA}", "model"),
        (f"/hub/models--gpt2/snapshots/{SHA}", "gpt2"),
        ("/checkpoints/model/", "model"),
        ("/our--model/snapshots/v1", "v1"),
        (".", Path.cwd().name),
    ],
)
def test_a_checkpoint_is_called_by_its_name(directory: str, name: str) -> None:
    assert checkpoint_name(directory) == name
