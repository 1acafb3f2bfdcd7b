"""Adapters as options: of engines, replicas and commands, and what they say of what is merged."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft_adapters import make_adapter, merge, save_adapter, tensors_of
from vision_checkpoints import make_gemma3

from checkpoints import (
    PARAMS,
    PROMPTS,
    SMALL,
    TINY,
    assert_greedy,
    copy_checkpoint,
    edit_json,
    make_checkpoint,
)
from nanovllm import LLM, AsyncLLM
from nanovllm.batch.identity import describe_job, differences
from nanovllm.checkpoint.files import ADAPTER, ADAPTER_WEIGHTS
from nanovllm.cli.main import main
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("adapters")
    return [make_adapter(base, path / name, seed=ord(name)) for name in "ab"]


@pytest.fixture(scope="module")
def whole(base: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(base, tmp_path_factory.mktemp("whole") / "model", *adapters)


def test_an_engine_says_what_it_has_merged(
    base: Path, adapters: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nanovllm")
    a, b = map(str, adapters)
    with LLM(base, adapter=adapters, **SMALL) as llm:
        assert repr(llm).endswith(", adapter 'a, b')")
        assert llm.metrics()["adapter"] == "a, b" and llm.config.adapters == (a, b)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("adapter")]
    assert said == [
        f"adapter: {each} (trained on {base}), merged into 14 tensors" for each in (a, b)
    ]
    with LLM(base, adapter=adapters[0], **SMALL) as llm:
        assert llm.metrics()["adapter"] == "a"
        llm.load_adapter(b)
        assert repr(llm).endswith(", adapter 'b')")
        llm.unload_adapter()
        assert "adapter" not in repr(llm)
    engine = AsyncLLM(base, adapter=b, **SMALL)
    assert repr(engine).endswith(", adapter 'b'))")
    engine.shutdown()
    for nothing in (None, []):
        with LLM(base, adapter=nothing, **SMALL) as llm:
            assert llm.metrics()["adapter"] == "none" and "adapter" not in repr(llm)
            assert llm.config.adapter is None


def test_unknown_fields_are_named(
    base: Path, adapters: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If they ask for something."""
    new = {"use_newest": True, "other": {"x": 1}, "unused": None, "off": False, "empty": {}}
    path = save_adapter(tmp_path / "adapter", tensors_of(adapters[0]), **new)
    with LLM(base, adapter=path, **SMALL):
        pass
    [said] = [r.getMessage() for r in caplog.records if "unknown here" in r.getMessage()]
    assert "ignored: other, use_newest; if they change what" in said


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        ("v_proj", ["layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj"]),
        ("layers.1.", ["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"]),
        ("model.norm", ["norm"]),
        ("nothing", []),
    ],
)
def test_an_adapter_saved_in_part_is_warned_of(
    lacks: str, named: list[str], base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not where its configuration has exceptions."""
    modules = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["norm"]}
    whole = make_adapter(base, tmp_path / "whole", **modules)
    tensors = {name: tensor for name, tensor in tensors_of(whole).items() if lacks not in name}
    part = save_adapter(tmp_path / "part", tensors, **modules)
    excepting = save_adapter(tmp_path / "excepting", tensors, **modules, layers_to_transform=[0])
    with LLM(base, adapter=part, **SMALL) as llm:
        llm.load_adapter(excepting)
    said = [r.getMessage() for r in caplog.records if "it has no tensors for" in r.getMessage()]
    wanted = ", ".join(f"model.{name}.weight" for name in named)
    assert [f"adapter {part}: it has no tensors for {wanted}, which its" in x for x in said] == (
        [True] if named else []
    )


def test_changes_of_a_tower_that_is_left_out_are_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log; the text is that of the model which peft has merged whole."""
    caplog.set_level(logging.INFO, "nanovllm")
    base = make_gemma3(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    of_tower = {name: x for name, x in tensors_of(adapter).items() if "vision_tower" in name}
    assert len(of_tower) == 4 and len(tensors_of(adapter)) == 10
    whole = merge(base, tmp_path / "whole", adapter)
    alone = save_adapter(tmp_path / "alone", of_tower)
    with pytest.raises(ValueError, match="an adapter must not change parts for images, got "):
        LLM(base, adapter=adapter, **SMALL)
    with pytest.raises(ValueError, match="it changes the part for images alone, which is left out"):
        LLM(base, adapter=alone, language_model_only=True, **SMALL)
    with LLM(base, adapter=adapter, language_model_only=True, **SMALL) as llm:
        assert_greedy(whole, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    said = [message for message in caplog.messages if "for images" in message]
    assert said == [f"adapter {adapter}: its 4 tensors for images are left out, as the model's are"]


@pytest.mark.parametrize(
    ("files", "is_named"),
    [
        ({"chat_template.jinja": "other"}, True),
        ({"chat_template.jinja": "same"}, False),
        ({"tokenizer_config.json": {"chat_template": "other"}}, True),
        ({"tokenizer_config.json": {"chat_template": "same"}}, False),
        (
            {"tokenizer_config.json": {"chat_template": "other"}, "chat_template.jinja": "same"},
            False,
        ),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "same"}]}},
            False,
        ),
        ({"tokenizer_config.json": {}}, False),
        ({"tokenizer_config.json": "{"}, False),
    ],
)
def test_another_chat_template_is_warned_of(
    files: dict[str, Any],
    is_named: bool,
    adapters: list[Path],
    base: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the start, and when it is loaded into an engine."""
    model = copy_checkpoint(base, tmp_path / "model")
    (model / "chat_template.jinja").write_text("same")
    adapter = shutil.copytree(adapters[0], tmp_path / "adapter")
    for name, contents in files.items():
        text = contents if isinstance(contents, str) else json.dumps(contents)
        (adapter / name).write_text(text)
    with LLM(model, adapter=adapter, **SMALL) as llm:
        llm.load_adapter(adapter)
    said = [message for message in caplog.messages if "chat template" in message]
    assert len(said) == 2 * is_named
    assert all(each.startswith(f"adapter {adapter} has another chat template") for each in said)


def test_an_adapter_beside_the_weights(
    base: Path, adapters: list[Path], whole: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It is not merged by itself; a warning says how."""
    path = copy_checkpoint(base, tmp_path / "model")
    for name in (ADAPTER, ADAPTER_WEIGHTS):
        shutil.copy(adapters[0] / name, path)
    with LLM(path, **SMALL):
        pass
    [said] = [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
    assert said.endswith(f"adapter is not in the weights yet, pass adapter={str(path)!r}")
    caplog.clear()
    with LLM(path, adapter=[path, adapters[1]], **SMALL) as llm:
        assert_greedy(whole, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert not [r for r in caplog.records if "is ignored" in r.getMessage()]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_processes_merge_the_same(
    options: dict[str, Any], base: Path, adapters: list[Path], whole: Path
) -> None:
    with LLM(base, adapter=adapters, **SMALL, **options) as llm:
        assert_greedy(whole, PROMPTS, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        metrics = llm.metrics()
        assert metrics["adapter"] == "a, b"
        replicas = metrics.get("replicas", {})
        assert [each["adapter"] for each in replicas.values()] == ["a, b"] * len(replicas)
        assert len(replicas) == (2 if "data_parallel_size" in options else 0)


# -- jobs -----------------------------------------------------------------------------------------


def test_a_job_is_known_by_its_adapters(base: Path, adapters: list[Path], tmp_path: Path) -> None:
    """By their contents and order, not by their paths."""
    params = SamplingParams()

    def job(*paths: Path) -> dict[str, Any]:
        return describe_job(Config(str(base), adapter=list(paths)), params)

    a, b = adapters
    copy = shutil.copytree(a, tmp_path / "copy")
    known = job(a)
    assert [*differences(known, job(copy))] == [] and "adapter" not in job()
    others = [job(), job(b), job(a, b), job(b, a)]
    for other in others:
        [change] = differences(known, other)
        assert change.startswith("adapter was [")
    assert len({json.dumps(other) for other in others}) == len(others)
    edit_json(copy / ADAPTER, lora_alpha=9)
    [change] = differences(known, job(copy))
    assert re.fullmatch(r'adapter was \["\w{32} a"\] and is \["\w{32} copy"\]', change)


def test_jobs_that_know_no_names_of_adapters_go_on(base: Path, adapters: list[Path]) -> None:
    """They were begun by a version that wrote hashes alone."""
    job = describe_job(Config(str(base), adapter=adapters), SamplingParams())
    old = {**job, "adapter": [each.split()[0] for each in job["adapter"]]}
    assert [*differences(old, job)] == [] == [*differences(job, old)]
    [change] = differences({**old, "adapter": old["adapter"][::-1]}, job)
    assert re.fullmatch(
        r'adapter was \["\w{32}", "\w{32}"\] and is \["\w{32} a", "\w{32} b"\]', change
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    prompts = [f"{i}+{i + 3}=" for i in range(5)]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return file


def test_generate_with_adapters(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag may be given again; another adapter is another job."""
    first, second = (
        make_adapter(TINY, tmp_path / name, seed=seed) for name, seed in (("one", 1), ("two", 2))
    )
    whole = merge(TINY, tmp_path / "whole", first, second)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, whole)
    prompts = [json.loads(line)["prompt"] for line in rows.read_text().splitlines()]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(whole, device="cpu") as llm:
        wanted = [out.outputs[0].text for out in llm.generate(prompts, params, use_tqdm=False)]
    out = tmp_path / "out.jsonl"
    command = ["generate", "--model", str(TINY), "--input", str(rows), "--output", str(out)]
    command += ["--device", "cpu", "--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    both = ["--adapter", str(first), "--adapter", str(second)]
    assert main([*command, *both]) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert {each["_row"]: each["generated_text"] for each in results} == dict(enumerate(wanted))
    capsys.readouterr()
    for flags in ([], both[:2], [*both[2:], *both[:2]]):
        assert main([*command, *flags]) == 2
        assert "was begun by another job: adapter was [" in capsys.readouterr().err
    assert main([*command, *both]) == 0, "nothing is left to compute"


def test_flags_of_what_is_no_adapter(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", str(TINY), "--input", str(rows), "--adapter", str(TINY)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "has no adapter_config.json: it holds a whole model" in said and said.count("\n") == 1
