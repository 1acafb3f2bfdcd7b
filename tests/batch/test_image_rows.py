"""Rows with images: JSON Lines, OpenAI's batch format, data frames, and replicas of the engine."""

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_host import picture, picture_host, send
from PIL import Image as Pillow
from seeing import GREEDY, PICTURE, make_seeing, photo

from checkpoints import SMALL
from nanovllm import LLM
from nanovllm.batch import Generate, ResumableSink, read_rows, run
from nanovllm.batch.job import AT_ONCE
from nanovllm.batch.rows import as_rows
from nanovllm.batch.tables import read_images
from nanovllm.images.reading import open_picture

OPTIONS: dict[str, Any] = {**SMALL, "num_kvcache_blocks": 64, "max_num_batched_tokens": 256}
A, B = photo(100, 70, 1), photo(64, 96, 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, one of which breaks off."""
    folder = tmp_path_factory.mktemp("pictures")
    A.save(folder / "a.png")
    B.save(folder / "b.png")
    photo(200, 200, 3).save(folder / "cut.png")
    data = (folder / "cut.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 3])
    return folder


@pytest.fixture(scope="module")
def llm(path: Path, folder: Path) -> Iterator[LLM]:
    with LLM(path, **OPTIONS, allowed_local_media_path=str(folder)) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(llm: LLM) -> dict[str, str]:
    """The answers to "what?" in a chat, and to a plain prompt, about each picture."""
    found = {}
    for name, image in (("a", A), ("b", B)):
        message = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
        [answer] = llm.chat([{"role": "user", "content": message}], GREEDY, use_tqdm=False)
        found[f"chat {name}"] = answer.outputs[0].text
        prompt = {"prompt": f"{PICTURE}what?", "multi_modal_data": {"image": image}}
        found[f"plain {name}"] = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].text
    assert len({*found.values()}) > 1, "pictures matter"
    return found


def url(image: Pillow.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_rows_of_a_file(llm: LLM, folder: Path, tmp_path: Path, texts: dict[str, str]) -> None:
    a, b, cut = (str(folder / f"{name}.png") for name in ("a", "b", "cut"))
    bare = [{"type": "image"}, {"type": "text", "text": "what?"}]
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"prompt": f"{PICTURE}what?", "multi_modal_data": {"image": a}}, "plain a"),
        ({"prompt": f"{PICTURE}what?", "multi_modal_data": {"image": [b]}}, "plain b"),
        ({"prompt": f"{PICTURE}what?", "multi_modal_data": {"image": cut}}, None),
        ({"prompt": f"{PICTURE}what?", "multi_modal_data": {"image": "missing.png"}}, None),
        (
            {
                "messages": [{"role": "user", "content": bare}],
                "multi_modal_data": {"image": b},
            },
            "chat b",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "image": a, "text": None}, bare[1]],
                    }
                ]
            },
            "chat a",
        ),
        (
            {"messages": [{"role": "user", "content": "what?"}], "multi_modal_data": {"image": b}},
            None,
        ),
        (
            {"prompt": "what?", "multi_modal_data": {"image": b}},
            None,
        ),
        (
            {
                "messages": [{"role": "user", "content": bare}],
                "multi_modal_data": {"image": "missing.png"},
            },
            None,
        ),
    ]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row, _ in cases))
    with ResumableSink(out) as sink:
        for result in run(llm, sink.unfinished(read_rows(file)), GREEDY):
            sink.write(result)
    lines = {line["_row"]: line for line in map(json.loads, out.read_text().splitlines())}
    for i, (row, name) in enumerate(cases):
        assert (lines[i]["error"] is None) == (name is not None), lines[i]
        if name is not None:
            assert lines[i]["generated_text"] == texts[name]
            assert lines[i].get("multi_modal_data") == row.get("multi_modal_data")
    assert lines[8]["error"].startswith('`row["multi_modal_data"]["image"]` cannot be read')
    assert "cut.png" in lines[2]["error"] and "missing.png" in lines[3]["error"]
    assert '{"type": "image"} for each image beside it, got 1 fewer' in lines[6]["error"]
    with ResumableSink(out) as sink:
        assert not list(sink.unfinished(read_rows(file))), "all are finished"


def test_a_field_that_may_mean_a_picture_is_named(
    llm: LLM, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "what?", "image": "a.png"}, {"prompt": "what?", "images": None}]
    for row in rows * 2:
        [_] = run(llm, [row], GREEDY)
    assert len(caplog.messages) == 2, "once for a job"
    assert all("rows have a field `image`, which has no effect" in each for each in caplog.messages)
    assert '"multi_modal_data": {"image": ...}' in caplog.text
    caplog.clear()
    image = {"image": str(folder / "a.png")}
    [_] = run(llm, [{"prompt": PICTURE, "image": "a", "multi_modal_data": image}], GREEDY)
    assert not caplog.messages


def test_token_ids_with_images(llm: LLM, folder: Path, texts: dict[str, str]) -> None:
    """In either field; integers may be written as 8.0, also in limits."""
    ids = llm.get_tokenizer().encode(f"{PICTURE}what?")
    image = {"multi_modal_data": {"image": str(folder / "a.png")}}
    few = {"max_pixels": 2048.0, "min_pixels": None, "size": None}
    rows: list[dict[str, Any]] = [
        {"prompt": list(map(float, ids)), **image},
        {"prompt_token_ids": ids, **image},
        {"prompt": f"{PICTURE}what?", **image, "mm_processor_kwargs": few},
        {"prompt": ids, **image, "mm_processor_kwargs": {"size": {"longest_edge": 2048.0}}},
    ]
    results = list(run(llm, rows, GREEDY, ordered=True))
    assert [result.error for result in results] == [None] * 4
    outputs = [result.output for result in results if result.output is not None]
    said = [output.outputs[0].text for output in outputs]
    assert said[:2] == [texts["plain a"]] * 2
    counts = [len(output.prompt_token_ids) for output in outputs]
    assert counts[0] == counts[1] > counts[2] == counts[3] == len(ids)


def test_without_pillow_no_row_counts_as_finished(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is installed, the same job answers them."""
    image = {"image": str(folder / "a.png")}
    rows = [{"prompt": f"{PICTURE}{i}", "multi_modal_data": image} for i in range(3)]
    out = tmp_path / "out.jsonl"
    for is_there in (False, True):
        with ResumableSink(out) as sink, monkeypatch.context() as patch:
            if not is_there:
                patch.setitem(sys.modules, "PIL", None)
            results = run(llm, sink.unfinished(as_rows(rows)), GREEDY)
            if not is_there:
                with pytest.raises(ImportError, match="images need Pillow: pip install"):
                    next(results)
                assert llm.is_finished()
            for result in results:
                sink.write(result)
        lines = out.read_text().splitlines()
        assert [json.loads(line)["error"] for line in lines] == [None] * 3 * is_there


def test_prompts_as_messages_show_their_images_first(
    llm: LLM, folder: Path, texts: dict[str, str]
) -> None:
    rows = [{"prompt": "what?", "multi_modal_data": {"image": str(folder / "a.png")}}]
    [result] = run(llm, rows, GREEDY, chat=True)
    assert result.error is None and result.output is not None
    assert result.output.outputs[0].text == texts["chat a"]


def test_requests_of_openai(llm: LLM, folder: Path, tmp_path: Path, texts: dict[str, str]) -> None:
    def row(custom_id: str, image: str) -> dict[str, Any]:
        content = [
            {"type": "image_url", "image_url": {"url": image, "detail": "high"}},
            {"type": "text", "text": "what?"},
        ]
        body = {"model": "x", "messages": [{"role": "user", "content": content}]}
        return {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**body, "max_tokens": GREEDY.max_tokens, "temperature": 0},
        }

    outside = tmp_path / "outside.png"
    A.save(outside)
    rows = [
        row("data", url(A)),
        row("file", (folder / "b.png").as_uri()),
        row("outside", outside.as_uri()),
        row("network", "https://example.org/a.png"),
        row("cut", (folder / "cut.png").as_uri()),
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    results = {
        result.row.custom_id: result.to_dict() for result in run(llm, read_rows(file), GREEDY)
    }
    said = {
        custom_id: each["response"]["body"]["choices"][0]["message"]["content"]
        for custom_id, each in results.items()
        if each["error"] is None
    }
    # The body has no ignore_eos, which ends no text of these.
    assert said == {"data": texts["chat a"], "file": texts["chat b"]}
    assert "must be a file below" in results["outside"]["error"]["message"]
    assert "nothing is fetched" in results["network"]["error"]["message"]
    assert "cannot be read" in results["cut"]["error"]["message"]
    for custom_id in ("outside", "network", "cut"):
        assert results[custom_id]["response"]["status_code"] == 400


def test_rows_wait_while_pictures_take_up_the_memory(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data in their messages count from the moment that they are held."""
    monkeypatch.setattr(llm.core._preparation, "_max_bytes", 1)  # type: ignore[attr-defined]
    taken, done = [], []

    def rows() -> Iterator[dict[str, Any]]:
        for i in range(6):
            taken.append(i)
            assert len(taken) - len(done) <= 1 + (i > 4), "one at once, and the last two"
            part = {"type": "image_url", "image_url": {"url": url(photo(70 + i, 90, i))}}
            message = {"role": "user", "content": [part] if i < 5 else "no picture"}
            yield {"messages": [message], "custom_id": i}

    for result in run(llm, rows(), GREEDY):
        assert result.error is None
        done.append(result.row.custom_id)
    assert sorted(done) == taken == [*range(6)]


def test_pictures_of_hosts(path: Path, tmp_path: Path) -> None:
    """Rows pass one whose host is slow: the engine does not wait for it."""
    params = GREEDY

    def message(image: Any) -> list[dict[str, Any]]:
        part = {"type": "image_url", "image_url": image}
        return [{"role": "user", "content": [part]}]

    def openai(custom_id: str, image: str) -> dict[str, Any]:
        body = {"model": "x", "messages": message({"url": image}), "temperature": 0}
        own = {**body, "max_tokens": params.max_tokens, "ignore_eos": True}
        row = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
        return {**row, "body": own}

    with (
        picture_host() as host,
        LLM(path, **OPTIONS, allowed_media_domains=["127.0.0.1"]) as llm,
    ):
        host.waits("slow")
        images = [picture(1), picture(2)]
        first, second = (
            each.outputs[0].text
            for each in llm.chat([message(image) for image in images], params, use_tqdm=False)
        )
        assert first != second
        rows = [
            {"id": "slow", "messages": message(host.url("slow"))},
            {"id": "quick", "messages": message(host.url("2.png"))},
            {"id": "text", "prompt": "what?"},
            {"id": "other", "messages": message(host.url("2.png", "localhost"))},
        ]
        found = {}
        for result in run(llm, rows, params):
            found[result.row.fields["id"]] = result
            if len(found) == 3:
                assert not host.gate.is_set() and "slow" not in found
                host.gate.set()
        assert found.keys() == {"slow", "quick", "text", "other"}
        for name, text in (("slow", first), ("quick", second)):
            assert found[name].output is not None, found[name].error
            assert found[name].output.outputs[0].text == text
        assert "of a host in `allowed_media_domains` (127.0.0.1)" in str(found["other"].error)
        file = tmp_path / "in.jsonl"
        asked = [openai("yes", host.url("1.png")), openai("no", host.url("1.png", "localhost"))]
        file.write_text("".join(json.dumps(each) + "\n" for each in asked))
        yes, no = (each.to_dict() for each in run(llm, read_rows(file), params, ordered=True))
        assert yes["response"]["body"]["choices"][0]["message"]["content"] == first
        assert no["response"]["status_code"] == 400
        assert "of a host in `allowed_media_domains`" in no["error"]["message"]
        host.gate.clear()  # leaving the loop waits for nobody
        before = len(host.asked)
        results = run(llm, rows[:3], params)
        assert next(results).row.fields["id"] != "slow"
        results.close()
        assert llm.is_finished() and not host.gate.is_set() and len(host.asked) > before


def talk(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_pictures_of_hosts_wait_while_others_take_up_the_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows that the window has room for were fetched at once."""
    options = {**OPTIONS, "max_num_seqs": 64, "allowed_media_domains": ["127.0.0.1"]}
    with picture_host() as host, LLM(path, **options) as llm:
        monkeypatch.setattr(llm.core._preparation, "_max_bytes", 1)  # type: ignore[attr-defined]
        done, most = 0, 0

        def count(handler: Any) -> None:
            nonlocal most
            most = max(most, len(host.asked) - done)
            send(handler, picture(1))

        host.pages |= {f"/{i}": count for i in range(100)}
        images = [
            [{"type": "image_url", "image_url": {"url": host.url(f"{i}")}}] for i in range(100)
        ]
        for result in run(llm, map(talk, images), GREEDY):
            assert result.error is None
            done += 1
        assert done == 100 and most <= AT_ONCE


def test_conversations_without_pictures_of_hosts_wait_for_none(path: Path, folder: Path) -> None:
    """They waited for a thread, and all had slow hosts."""
    options = {**OPTIONS, "max_num_seqs": 64, "allowed_local_media_path": str(folder)}
    with (
        picture_host() as host,
        LLM(path, **options, allowed_media_domains=["127.0.0.1"]) as llm,
    ):
        host.waits("slow")
        quick = [
            {"type": "image_url", "image_url": {"url": url(A)}},
            {"type": "image_url", "image_url": (folder / "a.png").as_uri()},
            {"type": "image", "image": {"path": str(folder / "a.png")}},
            {"type": "image", "image": A},
        ]
        remote = [
            {"type": "image_url", "image_url": {"url": host.url("slow")}},
            {"type": "image", "image": host.url("slow")},
            {"type": "image", "image": {"path": host.url("slow").upper().replace("SLOW", "slow")}},
        ]
        rows = [*([each] for each in remote * 10), "what?", *([each] for each in quick)]
        found = []
        for result in run(llm, map(talk, rows), GREEDY):
            assert result.error is None
            found.append(result.row.number)
            if len(found) == 1 + len(quick):
                assert not host.gate.is_set()
                host.gate.set()
        assert sorted(found[: 1 + len(quick)]) == [*range(30, 31 + len(quick))]
        assert len(found) == len(rows)


def test_data_frames(path: Path, folder: Path, texts: dict[str, str]) -> None:
    """Columns of paths, bytes, arrays and of structs with them; of numpy, pandas and Arrow."""
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    a, b = folder / "a.png", folder / "b.png"
    prompts = ["what?", "what?", "hm"]
    columns: list[Any] = [
        [str(a), str(b), None],
        [a.read_bytes(), b.read_bytes(), None],
        [np.asarray(A), np.asarray(B), None],
        [[str(a)], [str(b)], []],
        [{"bytes": a.read_bytes(), "path": None}, {"bytes": None, "path": str(b)}, None],
    ]
    with Generate(
        path,
        image_column="image",
        chat=True,
        sampling_params={"temperature": 0, "max_tokens": GREEDY.max_tokens, "ignore_eos": True},
        **OPTIONS,
    ) as generate:
        for i, column in enumerate(columns):
            array = np.empty(3, object)
            array[:] = column
            batches: list[Any] = [{"prompt": np.array(prompts, object), "image": array}]
            batches.append(pandas.DataFrame({"prompt": prompts, "image": array}))
            if i != 2:
                batches.append(pyarrow.table({"prompt": prompts, "image": column}))
            for batch in batches:
                out = generate(batch)
                found = out["generated_text"]
                found = found.to_pylist() if hasattr(found, "to_pylist") else list(found)
                assert found[:2] == [texts["chat a"], texts["chat b"]]
                assert isinstance(found[2], str)
        nested = [np.asarray(image).tolist() for image in (A, B)]
        frame = pandas.DataFrame({"prompt": prompts[:2], "image": nested})
        table = pyarrow.table({"prompt": prompts[:2], "image": nested})
        for batch, kind in ((frame, "'image'"), (table, r"'image' \(list<.*list<.*int64>.*\)")):
            with pytest.raises(TypeError, match=f"got lists of numbers in {kind}: pass arrays"):
                generate(batch)


def test_tensors_of_arrow() -> None:
    """They became flat lists of numbers."""
    pyarrow = pytest.importorskip("pyarrow")
    pixels = np.random.default_rng(5).integers(0, 256, (5, 20, 30, 3), np.uint8)
    whole = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    flat = [None, *pixels[1:].reshape(4, -1).tolist()]
    gap = whole.from_storage(whole.type, pyarrow.array(flat, whole.type.storage_type))
    table = pyarrow.table({"image": pyarrow.chunked_array([whole.slice(1, 2), whole, gap])})
    wanted = [*pixels[1:3], *pixels, None, *pixels[1:]]
    for batch, values in ((table, wanted), (table.to_batches()[0], wanted[:2])):
        found = read_images(batch, "image")
        assert [type(each) for each in found] == [type(each) for each in values]
        assert all(np.array_equal(*each) for each in zip(found, values, strict=True))
        picture = open_picture(found[0], "image")
        assert (picture.height, picture.width) == (20, 30)


@pytest.mark.slow
def test_replicas_get_images(path: Path, folder: Path, texts: dict[str, str]) -> None:
    prompts = [
        {"prompt": f"{PICTURE}what?", "multi_modal_data": {"image": folder / f"{name}.png"}}
        for name in ("a", "b", "cut", "b", "a")
    ]
    with LLM(path, **OPTIONS, data_parallel_size=2) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        metrics = llm.metrics()
    assert [output.error is None for output in outputs] == [True, True, False, True, True]
    for i, name in ((0, "a"), (1, "b"), (3, "b"), (4, "a")):
        assert outputs[i].outputs[0].text == texts[f"plain {name}"]
    assert metrics["num_images_prepared"] == 2 and metrics["num_images_failed"] == 1
