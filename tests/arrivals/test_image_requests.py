"""Requests with images, from the caller's arguments to tokens, against transformers' processor and
`generate`: a tiny random Qwen3-VL, float32, CPU.
"""

import asyncio
import base64
import io
import json
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_host import PATIENCE, PictureHost, picture, picture_host, send
from PIL import Image as Pillow
from seeing import GREEDY, PICTURE, SPECIAL, make_seeing, make_seeing_gemma3, photo, reference
from vision_checkpoints import PAD

from checkpoints import SMALL, assert_idle
from nanovllm import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from nanovllm.report.reading import read_trace

OPTIONS: dict[str, Any] = {**SMALL, "num_kvcache_blocks": 64, "max_num_batched_tokens": 256}
A, B, LARGE = photo(100, 70, 1), photo(64, 96, 2), photo(300, 400, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def seeing(path: Path) -> Any:
    with LLM(path, **OPTIONS, limit_mm_per_prompt={"image": 3}) as llm:
        yield llm


def encoded(image: Pillow.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def expected(path: Path, text: str, images: list[Any]) -> tuple[list[int], list[int]]:
    return reference(path, text, images, GREEDY.max_tokens or 0)


def found(output: Any) -> tuple[list[int], list[int]]:
    assert output.error is None, output.error
    return output.prompt_token_ids, output.outputs[0].token_ids


PROMPTS = {
    "one": (f"a{PICTURE}b", [A]),
    "two": (f"{PICTURE}and{PICTURE}?", [B, LARGE]),
    "twice": (f"{PICTURE}{PICTURE}", [A, A]),
    "none": ("text", []),
}


def test_prompts_are_those_of_transformers(seeing: LLM, path: Path) -> None:
    """With images as PIL has them, and some text alone; all at once."""
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": images[0] if len(images) == 1 else images}}
        for text, images in PROMPTS.values()
    ]
    before = seeing.metrics()
    outputs = seeing.generate(prompts, GREEDY, use_tqdm=False)
    for output, (text, images) in zip(outputs, PROMPTS.values(), strict=True):
        assert found(output) == expected(path, text, images)
        assert output.prompt == text
    after = seeing.metrics()
    assert after["num_images_prepared"] - before["num_images_prepared"] == 3, "each once"
    assert after["num_images_waiting"] == after["image_bytes"] == 0
    assert after["image_seconds"] > before["image_seconds"]
    assert_idle(seeing)


def test_gemma_3(tmp_path: Path) -> None:
    """Its placeholder becomes several tokens, with empty lines around them; all sizes are one."""
    path = make_seeing_gemma3(tmp_path / "model")
    start = "<|vision_start|>"
    prompts: list[tuple[str, list[Any]]] = [
        (f"a{start}b", [A]),
        (f"{start}\n{start}c", [B, LARGE]),
    ]
    with LLM(path, **OPTIONS) as llm:
        given = [{"prompt": p, "multi_modal_data": {"image": i}} for p, i in prompts]
        outputs = llm.generate(given, GREEDY, use_tqdm=False)
        ids, _ = expected(path, *prompts[0])
        given = [{"prompt_token_ids": ids, "multi_modal_data": {"image": A}}]
        outputs += llm.generate(given, GREEDY, use_tqdm=False)
        for text in (f"a{start}b", f"a{SPECIAL[PAD]}b"):
            ids = llm.get_tokenizer().encode(text)
            for each in (text, ids, {"prompt": text, "multi_modal_data": {"image": []}}):
                with pytest.raises(ValueError, match="got 1 without images: pass them"):
                    llm.generate(each, GREEDY, use_tqdm=False)
            with pytest.raises(ValueError, match=MORE_PLACEHOLDERS):
                llm.chat([{"role": "user", "content": text}], GREEDY, use_tqdm=False)
        given = [{"prompt_token_ids": [1], "multi_modal_data": {"image": A}}]
        with pytest.raises(ValueError, match=r"\(<\|image_pad\|> in token ids\) for each image"):
            llm.generate(given, GREEDY, use_tqdm=False)
    for output, prompt in zip(outputs, [*prompts, prompts[0]], strict=True):
        assert found(output) == expected(path, *prompt)
    with LLM(path, **OPTIONS, language_model_only=True) as llm:
        [plain] = llm.generate([f"a{start}b"], GREEDY, use_tqdm=False)
        assert plain.prompt_token_ids == llm.get_tokenizer().encode(f"a{start}b")


def test_all_forms_of_an_image(seeing: LLM, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(encoded(A))
    url = "data:image/png;base64," + base64.b64encode(encoded(A)).decode()
    forms = [A, np.asarray(A), encoded(A), file, str(file), url, file.as_uri(), [A], (file,)]
    text = f"a{PICTURE}b"
    ids = seeing.get_tokenizer().encode(text)
    prompts = [{"prompt": text, "multi_modal_data": {"image": form}} for form in forms]
    prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": A}})
    whole, tokens = expected(path, text, [A])
    prompts.append({"prompt_token_ids": whole, "multi_modal_data": {"image": A}})
    outputs = seeing.generate(prompts, GREEDY, use_tqdm=False)
    assert [found(output) for output in outputs] == [(whole, tokens)] * len(prompts)


def test_limits_on_pixels(path: Path) -> None:
    text = f"{PICTURE}!"
    prompt = {"prompt": text, "multi_modal_data": {"image": LARGE}}
    small = LARGE.resize((128, 96))
    with LLM(path, **OPTIONS, mm_processor_kwargs={"max_pixels": 16_000}) as llm:
        own = {**prompt, "mm_processor_kwargs": {"size": {"longest_edge": 4096}}}
        outputs = llm.generate([prompt, own], GREEDY, use_tqdm=False)
    assert len(outputs[0].prompt_token_ids) == 3 + 16_000 // 1024 - 3, "4 x 3 of 32 pixels"
    assert len(outputs[1].prompt_token_ids) == 3 + 2
    assert small.size == (128, 96)


def test_refusals_come_before_anything_runs(seeing: LLM, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    good = {"prompt": f"{PICTURE}", "multi_modal_data": {"image": A}}
    cases: list[tuple[Any, str]] = [
        ({"prompt": "a", "multi_modal_data": {"image": A}}, "for each image, got 0 for 1 image$"),
        ({"prompt": PICTURE}, "got 1 without images: pass them in multi_modal_data"),
        ({"prompt": PICTURE, "multi_modal_data": {"image": broken}}, "must be a picture that"),
        ({"prompt": PICTURE, "multi_modal_data": {"video": A}}, "videos are not supported"),
        ({"prompt": PICTURE * 4, "multi_modal_data": {"image": [A] * 4}}, "at most 3 images"),
        ({"multi_modal_data": {"image": A}}, "must have the keys `prompt` or"),
        (
            {"prompt": PICTURE * 3 + "a" * 120, "multi_modal_data": {"image": [LARGE] * 3}},
            r"got 231 tokens \(105 of images\): shorten the text, or raise max_model_len",
        ),
        (
            {"prompt": PICTURE * 3 + "a" * 20, "multi_modal_data": {"image": [LARGE] * 3}},
            r"got 131 tokens \(105 of images\): lower max_pixels in .*, shorten the text, or raise",
        ),
    ]
    steps = seeing.metrics()["num_steps"]
    for prompt, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            seeing.generate([good, prompt], GREEDY, use_tqdm=False)
    assert seeing.metrics()["num_steps"] == steps
    outputs = seeing.generate(
        [good, *(prompt for prompt, _ in cases)], GREEDY, use_tqdm=False, on_error="return"
    )
    assert outputs[0].error is None and all(output.error for output in outputs[1:])
    assert_idle(seeing)


def test_a_file_that_breaks_off_is_an_error_of_its_row(seeing: LLM, tmp_path: Path) -> None:
    """Its size can be read; the rest is missing when its turn comes."""
    cut = tmp_path / "cut.png"
    cut.write_bytes(encoded(LARGE)[:2000])
    prompts = [
        {"prompt": PICTURE, "multi_modal_data": {"image": image}} for image in (A, cut, B, [cut])
    ]
    before = seeing.metrics()
    outputs = seeing.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, True, False]
    assert "cut.png" in outputs[1].error and "\n" not in outputs[1].error
    assert outputs[1].outputs == [] and outputs[1].finished
    after = seeing.metrics()
    assert after["num_images_failed"] - before["num_images_failed"] == 1
    assert after["num_finished"] - before["num_finished"] == 4
    assert outputs[1].error.startswith("`image` cannot be read: ")
    [streamed] = list(seeing.stream([prompts[1]], GREEDY))
    assert streamed.finished and streamed.error == outputs[1].error
    several = {"prompt": PICTURE * 3, "multi_modal_data": {"image": [A, cut, B]}}
    [output] = seeing.generate([several], GREEDY, use_tqdm=False)
    assert output.error == outputs[1].error.replace("`image`", "`image[1]`"), "which of them"
    with pytest.raises(StopIteration):
        next(iter(seeing.stream([], GREEDY)))
    assert_idle(seeing)


class Gate:
    """An image whose reading waits for the test: a file object's stand-in, by `__array__`."""

    def __init__(self, image: Pillow.Image, monkeypatch: pytest.MonkeyPatch) -> None:
        from nanovllm.images import preparation

        self.open, self.begun = threading.Event(), threading.Event()
        own, original = np.asarray(image), preparation._prepare
        self.array = own.copy()

        def prepare(sized: Any, *others: Any) -> Any:
            if sized.picture.source.value is self.array:
                self.begun.set()
                assert self.open.wait(60), "the test did not go on"
            return original(sized, *others)

        monkeypatch.setattr(preparation, "_prepare", prepare)


def test_others_pass_a_request_that_waits(
    seeing: LLM, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(A, monkeypatch)
    slow = seeing.add_request(
        {"prompt": f"a{PICTURE}b", "multi_modal_data": {"image": gate.array}}, GREEDY
    )
    fast = seeing.add_request("text", GREEDY)
    assert gate.begun.wait(60)
    finished: list[Any] = []
    while not finished:
        finished += seeing.step()
    assert [output.request_id for output in finished] == [fast] and not seeing.is_finished()
    assert seeing.metrics()["num_images_waiting"] == 1
    gate.open.set()
    while not seeing.is_finished():
        finished += seeing.step()
    assert finished[1].request_id == slow
    assert found(finished[1]) == expected(path, f"a{PICTURE}b", [A])


def test_texts_do_not_keep_a_large_request_waiting(
    seeing: LLM, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own images take up all memory: it gets the next ones though the engine is not idle."""
    preparation = seeing.core._preparation
    monkeypatch.setattr(preparation, "_max_bytes", 1)
    text, images = f"{PICTURE}{PICTURE}{PICTURE}", [A, B, photo(90, 64, 4)]
    wanted = [expected(path, *each)[0] for each in ((text, images), (PICTURE, [LARGE]))]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    long = seeing.add_request("text", params)
    seeing.add_request({"prompt": text, "multi_modal_data": {"image": images}}, GREEDY)
    seeing.add_request({"prompt": PICTURE, "multi_modal_data": {"image": LARGE}}, GREEDY)
    finished: list[Any] = []
    for _ in range(40):
        finished += seeing.step()
        preparation.wait(60)
    assert [found(output)[0] for output in finished] == wanted
    assert seeing.abort(long)


def test_abort_while_it_is_read(seeing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for images any more, and the memory of this one is given back all the same."""
    for steps in (False, True):
        with monkeypatch.context() as patch:
            gate = Gate(A, patch)
            prompt = {"prompt": PICTURE, "multi_modal_data": {"image": gate.array}}
            waits = seeing.add_request(prompt, GREEDY)
            assert gate.begun.wait(60) and seeing.metrics()["image_bytes"]
            assert seeing.abort(waits)
            gate.open.set()
            preparation = seeing.core._preparation
            while preparation._done.empty():
                preparation.wait(60)
            if steps:
                seeing.step()
                assert not preparation.is_running
            assert seeing.metrics()["image_bytes"] == 0


def test_abort_while_it_waits(seeing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(A, monkeypatch)
    prompt = {"prompt": PICTURE, "multi_modal_data": {"image": gate.array}}
    first, second = (seeing.add_request(prompt, GREEDY) for _ in range(2))
    assert gate.begun.wait(60)
    assert seeing.abort(first) and not seeing.abort(first)
    stream = seeing.stream([prompt], GREEDY)
    later = threading.Timer(0.05, gate.open.set)
    later.start()
    assert next(iter(stream)).outputs[0].token_ids, "an image in use is not dropped"
    stream.close()  # type: ignore[attr-defined]
    while not seeing.is_finished():
        assert {output.request_id for output in seeing.step()} <= {second}
    gate.open.set()
    assert_idle(seeing)


def test_ctrl_c_while_memory_is_given_back(seeing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after that."""
    preparation = seeing.core._preparation
    release, interrupts = preparation.release, [signal.SIGINT]

    def interrupted(request_ids: Any) -> None:
        if interrupts and preparation.admitted:
            signal.raise_signal(interrupts.pop())
        release(request_ids)

    monkeypatch.setattr(preparation, "release", interrupted)
    seeing.add_request({"prompt": PICTURE, "multi_modal_data": {"image": A}}, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        while True:
            seeing.step()
    assert not interrupts and seeing.metrics()["image_bytes"] == 0
    seeing.abort_all()
    assert_idle(seeing)


def test_exit_leaves_no_threads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("images")]

    others = set(threads())
    gate = Gate(A, monkeypatch)
    llm = LLM(path, **OPTIONS)
    for image in (gate.array, B, LARGE):
        llm.add_request({"prompt": PICTURE, "multi_modal_data": {"image": image}}, GREEDY)
    assert gate.begun.wait(60)
    gate.open.set()
    llm.exit()
    assert len(threads()) <= len(others) and llm.is_closed


def test_chat(seeing: LLM, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.png"
    file.write_bytes(encoded(B))
    url = "data:image/png;base64," + base64.b64encode(encoded(B)).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "image_url", "image_url": url},
        {"type": "image", "image": B},
        {"type": "image", "image": file},
        {"type": "image", "url": url},
        {"type": "image_pil", "image_pil": B},
        {"type": "input_image", "image_url": url, "detail": "high", "file_id": None},
    ]
    conversations = [
        [
            {"role": "system", "content": "look"},
            {"role": "user", "content": [part, {"type": "text", "text": "what?"}]},
        ]
        for part in parts
    ]
    text = f"<|im_start|>systemlook<|im_end|><|im_start|>user{PICTURE}what?<|im_end|>"
    text += "<|im_start|>assistant"
    outputs = seeing.chat(conversations, GREEDY, use_tqdm=False)
    for output in outputs:
        assert output.prompt == text
        assert found(output) == expected(path, text, [B])


def test_limits_of_a_part(seeing: LLM) -> None:
    """Each image has its own."""
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": LARGE, "max_pixels": 4096},
        {"type": "image", "image": LARGE},
        {"type": "image", "image": LARGE, "max_pixels": 2048, "min_pixels": 1024},
    ]
    [output] = seeing.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    token = seeing.get_tokenizer().convert_tokens_to_ids("<|vision_start|>")
    ids = output.prompt_token_ids
    pieces = "".join("." if i == token else "#" if i == PAD else " " for i in ids).split(".")
    counts = [piece.count("#") for piece in pieces[1:]]
    assert counts == [2, 35, 1], "1 x 2, 5 x 7 and one of 32 pixels"


MORE_PLACEHOLDERS = (
    r"^`messages` must have a part with an image for each placeholder <.*>, got (1 for 0 images|2 "
    r"for 1 image): add such a part, or write it otherwise in the text$"
)


def test_placeholders_in_the_text_of_a_chat(seeing: LLM) -> None:
    """The error named a key that conversations do not have."""
    for content in (PICTURE, [{"type": "image", "image": A}, {"type": "text", "text": PICTURE}]):
        with pytest.raises(ValueError, match=MORE_PLACEHOLDERS):
            seeing.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)


def test_chat_refuses(seeing: LLM, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "b.png"
    file.write_bytes(encoded(B))
    cases: list[tuple[Any, str]] = [
        ({"type": "image_url", "image_url": {"url": file.as_uri()}}, "allowed_local_media_path"),
        ({"type": "image", "image": str(file)}, "allowed_local_media_path"),
        ({"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}, "from the network"),
        ({"type": "image_url", "image_url": {}}, r"\[\"image_url\"\]` must have a `url`"),
        ({"type": "image"}, "must have an image"),
        (
            {"type": "image", "image": b"x"},
            r"^`messages\[0\]\[\"content\"\]\[0\]\[\"image\"\]` must be",
        ),
        ({"type": "image", "image": B, "resized_height": 64}, "no others, got 'resized_height'"),
        ({"type": "image", "image": B, "max_pixels": 0}, r"\[0\].max_pixels` must be .*, got 0"),
        ({"type": "input_image", "image_url": "data:,x", "file_id": 1}, "others, got 'file_id'"),
        (
            {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
            "must be auto or high, got 'low': bound the size by max_pixels",
        ),
        ({"type": "image_url", "image_url": {"url": "data:,x", "fps": 1}}, "others, got 'fps'"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "videos are not supported"),
        ({"type": "input_audio", "input_audio": {}}, "sound is not supported"),
        ({"type": "image_embeds", "image_embeds": 1}, "embeddings of images are not supported"),
    ]
    for part, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            seeing.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)
    with LLM(path, **OPTIONS, allowed_local_media_path=str(tmp_path)) as llm:
        content = [cases[0][0], cases[1][0]]
        [output] = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        assert output.error is None
        with pytest.raises(ValueError, match="must be a file below"):
            part = {"type": "image", "image": str(path / "config.json")}
            llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


def test_a_recording_has_the_images(seeing: LLM, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    prompts = [
        {"prompt": PICTURE, "multi_modal_data": {"image": photo(90, 90, seed)}} for seed in range(5)
    ]
    with seeing.trace(file):
        seeing.generate([*prompts, prompts[0]], GREEDY, use_tqdm=False)
    seeing.generate(prompts, GREEDY, use_tqdm=False)  # not recorded
    events = json.loads(file.read_text())
    prepared = [each for each in events if each.get("cat") == "image" and each["name"] == "prepare"]
    assert len(prepared) == 5 and all(each["dur"] > 0 for each in prepared)
    counts = [each["args"] for each in events if each["name"] == "images" and each["ph"] == "C"]
    assert max(each["requests waiting"] for each in counts) == 6
    assert counts[-1]["requests waiting"] == 0
    trace = read_trace(str(file))
    assert len(trace.image_seconds) == 5 and trace.has_ended
    assert trace.engines[0].images_waiting.min() >= 0


def test_async(path: Path) -> None:
    async def run() -> list[Any]:
        async with AsyncLLM(path, **OPTIONS) as llm:

            async def one(prompt: Any) -> Any:
                last = None
                async for output in llm.generate(prompt, GREEDY):
                    last = output
                return last

            prompts = [
                {"prompt": text, "multi_modal_data": {"image": images}}
                for text, images in PROMPTS.values()
            ]
            return await asyncio.gather(*map(one, prompts))

    for output, (text, images) in zip(asyncio.run(run()), PROMPTS.values(), strict=True):
        assert found(output) == expected(path, text, images)


def test_async_chat_waits_for_hosts_in_another_thread(path: Path) -> None:
    """The loop's tasks and the engine's requests go on meanwhile."""

    async def run(host: PictureHost) -> tuple[Any, Any]:
        async with AsyncLLM(path, **OPTIONS, allowed_media_domains=["127.0.0.1"]) as llm:

            async def chat(image: Any) -> Any:
                content = [{"type": "image", "image": image}]
                return await llm.render([{"role": "user", "content": content}])

            async def last(prompt: Any) -> Any:
                return [output async for output in llm.generate(prompt, GREEDY)][-1]

            slow = asyncio.create_task(chat(host.url("slow")))
            while not host.asked:
                await asyncio.sleep(0)
            wanted = await last(await chat(picture(1)))
            assert not slow.done() and len(host.asked) == 1
            host.gate.set()
            return wanted, await last(await slow)

    with picture_host() as host:

        def slow(handler: Any) -> None:
            assert host.gate.wait(PATIENCE)
            send(handler, picture(1))

        host.pages["/slow"] = slow
        wanted, output = asyncio.run(run(host))
    assert found(output) == found(wanted)


def test_a_model_that_does_not_see(path: Path, checkpoint: Path, tmp_path: Path) -> None:
    """One of text, one whose processor is missing, and one that was told so."""
    prompt = {"prompt_token_ids": [1], "multi_modal_data": {"image": A}}
    with (
        LLM(checkpoint, **SMALL) as llm,
        pytest.raises(ValueError, match="must have no images: Qwen3ForCausalLM does not see"),
    ):
        llm.generate([prompt], GREEDY, use_tqdm=False)
    limits = {"prompt_token_ids": [1], "mm_processor_kwargs": {"max_pixels": 4096}}
    with (
        LLM(checkpoint, **SMALL) as llm,
        pytest.raises(ValueError, match="has no effect: Qwen3ForCausalLM does not see"),
    ):
        llm.generate([limits], GREEDY, use_tqdm=False)
    options: dict[str, Any] = {
        "limit_mm_per_prompt": {"image": {"count": 2}},
        "mm_processor_kwargs": {"max_pixels": 4096},
        "allowed_local_media_path": str(tmp_path),
        "allowed_media_domains": ["a.org"],
    }
    for name, value in options.items():
        with pytest.raises(ValueError, match=f"`{name}` must be left out .*Qwen3ForCausalLM does"):
            LLM(checkpoint, **SMALL, **{name: value})
    none: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0}, "mm_processor_kwargs": {}}
    LLM(checkpoint, **SMALL, **none, language_model_only=True).exit()
    for given in ({"limit_mm_per_prompt": {"image": 2}}, {"allowed_local_media_path": "/tmp"}):
        with pytest.raises(ValueError, match=r"must be left out .* language_model_only=True"):
            LLM(checkpoint, **SMALL, **given, language_model_only=True)
    LLM(checkpoint, **SMALL, **none).exit()
    lacking = shutil.copytree(path, tmp_path / "lacking")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (lacking / name).unlink(missing_ok=True)
    with (
        LLM(lacking, **OPTIONS) as llm,
        pytest.raises(ValueError, match="must have no images: the checkpoint has no vision tower"),
    ):
        llm.generate([prompt], GREEDY, use_tqdm=False)
    with LLM(path, **OPTIONS, language_model_only=True) as llm:
        with pytest.raises(ValueError, match=r"must have no images: .* language_model_only=True"):
            llm.generate([prompt], GREEDY, use_tqdm=False)
        assert "num_images_waiting" not in llm.metrics()
        assert llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].error is None


def test_without_pillow(seeing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    prompt = {"prompt": PICTURE, "multi_modal_data": {"image": b"x"}}
    with pytest.raises(ImportError, match='images need Pillow: pip install "pillow>=10"'):
        seeing.generate([prompt], GREEDY, use_tqdm=False)
    assert seeing.generate(["text"], GREEDY, use_tqdm=False)[0].error is None


def test_ctrl_c_in_a_wait_for_images(
    seeing: LLM, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request stays; the next step goes on."""
    gate = Gate(A, monkeypatch)
    prompt = {"prompt": f"a{PICTURE}b", "multi_modal_data": {"image": gate.array}}
    seeing.add_request(prompt, GREEDY)
    assert gate.begun.wait(60)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(seeing.core._preparation, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            seeing.step()
    gate.open.set()
    finished: list[Any] = []
    while not seeing.is_finished():
        finished += seeing.step()
    assert found(finished[0]) == expected(path, f"a{PICTURE}b", [A])


def test_beams_of_prompts_with_images(seeing: LLM, tmp_path: Path) -> None:
    """Each image is read once, by threads, before the first step; one that cannot be read is the
    error of its prompt.
    """
    cut = tmp_path / "cut.png"
    cut.write_bytes(encoded(LARGE)[:2000])
    images = [A, cut, B, A, None]
    prompts = [
        {"prompt": PICTURE + "a" if image else "a", "multi_modal_data": {"image": image}}
        for image in images
    ]
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    seeing.reset_prefix_cache()
    before = seeing.metrics()
    outputs = seeing.beam_search(prompts, params)
    after = seeing.metrics()
    assert [output.error is None for output in outputs] == [True, False, True, True, True]
    assert "cut.png" in (outputs[1].error or "")
    assert after["num_images_prepared"] - before["num_images_prepared"] == 2
    assert after["num_images_encoded"] - before["num_images_encoded"] == 2
    assert after["image_bytes"] == after["num_images_waiting"] == 0
    a, _, b, again, text = (output.sequences for output in outputs)
    assert [beam.tokens for beam in a] == [beam.tokens for beam in again] and len(a) == 2
    assert len({beam.text for beams in (a, b, text) for beam in beams}) > 2
    waits = seeing.add_request(prompts[0], GREEDY)
    with pytest.raises(RuntimeError, match="without other requests"):
        seeing.beam_search(prompts[:1], params)
    assert seeing.abort(waits)
    assert_idle(seeing)


def test_an_interrupted_beam_search_leaves_nothing(
    seeing: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(A, monkeypatch)

    def interrupt(seconds: float) -> None:
        gate.open.set()
        raise KeyboardInterrupt

    prompt = {"prompt": PICTURE, "multi_modal_data": {"image": gate.array}}
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(seeing.core._preparation, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            seeing.beam_search([prompt], params)
    assert seeing.metrics()["image_bytes"] == 0
    [output] = seeing.beam_search([prompt], params)
    assert output.error is None and len(output.sequences) == 2
