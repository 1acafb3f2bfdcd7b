"""Images in messages over HTTP, by OpenAI's client: the answers are `LLM.chat`'s, and nothing of
the server's machine or network can be named.
"""

import base64
import io
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the extra `vision`")
openai = pytest.importorskip("openai", reason="needs the client openai")

import numpy as np  # noqa: E402
from http_server import OPTIONS, PATIENCE, serving  # noqa: E402
from make_tiny_vision import make_model  # noqa: E402
from picture_host import picture, picture_host  # noqa: E402
from PIL import Image as Picture  # noqa: E402

from faults import wait_until  # noqa: E402
from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.images import resizing  # noqa: E402

SEED = 11


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision") / "model"
    make_model(path)
    return path


def data_url(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    with io.BytesIO() as stream:
        Picture.fromarray(pixels).save(stream, "PNG")
        return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def conversation(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": x}} for x in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


def test_answers_are_those_of_chat(model: Path) -> None:
    """Whole and streamed; another picture has another answer."""
    print("seed", SEED)
    seeds = random.Random(SEED).sample(range(1000), 3)
    asked = [conversation(data_url(s)) for s in seeds]
    asked.append(conversation(*map(data_url, seeds[:2])))
    with LLM(model, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        outputs = llm.chat(asked, params, use_tqdm=False)
    wanted = [(output.outputs[0].text, len(output.prompt_token_ids)) for output in outputs]
    assert len(set(wanted)) == 4
    options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
    with serving(model) as place:
        client = openai.OpenAI(base_url=f"{place.url}/v1", **options)
        create = client.chat.completions.create
        for messages, (text, count) in zip(asked, wanted, strict=True):
            own = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
            answer = create(**own)
            assert answer.choices[0].message.content == text
            assert answer.usage.prompt_tokens == count
            tokens = place.post("/tokenize", {"messages": messages}).json()
            assert tokens["count"] == count == len(tokens["tokens"])
            with pytest.raises(
                openai.BadRequestError, match="must be null beside images"
            ) as caught:
                create(**own, extra_body={"truncate_prompt_tokens": 30})
            assert caught.value.param == "truncate_prompt_tokens"
            events = list(create(**own, stream=True))
            assert "".join(x.choices[0].delta.content or "" for x in events if x.choices) == text
        assert place.metrics()["num_images_encoded"] == 3, "each of the pictures once"
        long = conversation(data_url(seeds[0]))
        long[0]["content"].append({"type": "text", "text": "x" * place.llm.max_model_len})
        refused = place.post("/tokenize", {"messages": long})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"


def test_files_and_other_machines_are_refused(model: Path, tmp_path: Path) -> None:
    """But for files below the folder that is allowed."""
    allowed, secret = tmp_path / "allowed", tmp_path / "secret.png"
    allowed.mkdir()
    for seed, path in enumerate((allowed / "one.png", secret)):
        path.write_bytes(base64.b64decode(data_url(seed).partition(",")[2]))
    (allowed / "link.png").symlink_to(secret)
    strings = [str(secret), secret.as_uri(), f"{allowed.as_uri()}/../secret.png"]
    strings += [f"{allowed}/link.png", "http://127.0.0.1:1/x.png", "ftp://h/x", "data:,", "\0"]
    body = {"model": "tiny", "max_tokens": 1}
    with serving(model, allowed_local_media_path=allowed) as place:
        for value in strings:
            for part in (
                {"type": "image_url", "image_url": {"url": value}},
                {"type": "image", "image": value},
                {"type": "image", "image": {"path": value}},
                {"type": "image", "image": {"bytes": value}},
                {"type": "image", "image": {"path": {"path": value}}},
                {"type": "image", "image": {"path": {"bytes": value}}},
                {"type": "image", "image": {"bytes": {"path": value}}},
                {"type": "input_image", "image_url": value},
            ):
                messages = [{"role": "user", "content": [part]}]
                response = place.post("/v1/chat/completions", {**body, "messages": messages})
                assert response.status_code == 400, (part, response.text)
                assert "secret.png" not in response.text or value in response.text
        messages = conversation((allowed / "one.png").as_uri())
        answer = place.post("/v1/chat/completions", {**body, "messages": messages})
        assert answer.status_code == 200, answer.text


def test_hosts_are_asked_where_the_server_was_started_with_their_names(model: Path) -> None:
    """Other clients are served meanwhile."""
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    encoded = base64.b64encode(picture(7)).decode()
    with (
        picture_host() as host,
        serving(model, allowed_media_domains=["127.0.0.1"]) as place,
        ThreadPoolExecutor(1) as others,
    ):

        def answer(url: str) -> Any:
            return place.post("/v1/chat/completions", {**body, "messages": conversation(url)})

        host.waits("slow", 7)
        host.leads("away", host.url("7.png", "localhost"))
        waiting = others.submit(answer, host.url("slow"))
        wait_until(lambda: host.asked)
        wanted = answer(f"data:image/png;base64,{encoded}")
        assert wanted.status_code == 200 and place.get("/health").status_code == 200
        assert not waiting.done()
        host.gate.set()
        for response in (waiting.result(PATIENCE), answer(host.url("7.png"))):
            assert response.status_code == 200, response.text
            assert response.json()["choices"] == wanted.json()["choices"]
        user = f"http://127.0.0.1@localhost:{host.port}/7.png"
        for url in (host.url("7.png", "localhost"), host.url("away"), host.url("none"), user):
            before = len(host.asked)
            response = answer(url)
            assert response.status_code == 400, response.text
            assert len(host.asked) - before == url.startswith(host.url(""))


@pytest.mark.parametrize("streams", [False, True])
def test_an_image_that_breaks_off_is_a_mistake(model: Path, streams: bool) -> None:
    """It is found out when the image is read, after the request is queued."""
    data = base64.b64decode(data_url(1).partition(",")[2])
    url = f"data:image/png;base64,{base64.b64encode(data[: len(data) // 2]).decode()}"
    body = {"messages": conversation(url), "max_tokens": 1, "stream": streams}
    with serving(model) as place:
        answer = place.post("/v1/chat/completions", body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "BadRequestError"
        whole = {**body, "messages": conversation(data_url(1))}
        assert place.post("/v1/chat/completions", whole).status_code == 200


def test_an_image_for_which_there_is_no_memory_is_no_mistake(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resize(*_: object) -> None:
        raise MemoryError("no room in /home/us")

    monkeypatch.setattr(resizing, "resize", resize)
    body = {"messages": conversation(data_url(2)), "max_tokens": 1}
    with serving(model) as place:
        answer = place.post("/v1/chat/completions", body)
        assert answer.status_code == 500 and "/home/us" not in answer.text
        monkeypatch.undo()
        assert place.post("/v1/chat/completions", body).status_code == 200
