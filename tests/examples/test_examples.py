"""Scripts of examples/ as users run them: what their pages say they print, and that it is right.

Those that need packages of the extra `examples` are in test_extras.py, Ray's in
batch/test_dataframes.py.
"""

import ast
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from runs import PAGES, ROOT, SCRIPTS, Runner, blocks, environment, first_command

from nanovllm import LLM, TINY
from nanovllm.images.reading import FORMATS

MAX_LINES = 60


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_is_short_and_has_a_page(name: str) -> None:
    assert len(SCRIPTS[name].read_text("utf-8").splitlines()) <= MAX_LINES
    assert f'--8<-- "examples/{name}.py"\n' in blocks(name, "python"), "a page that shows it whole"


def names(name: str) -> dict[str, Any]:
    """Names of a script, as if it had been imported."""
    return runpy.run_path(str(SCRIPTS[name]), run_name=name)


# -- what is right ------------------------------------------------------------------------------


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def prompts_file(directory: Path, printed: str, run: Runner) -> None:
    """The sums are; the same command again computes what the output lacks, and nothing else."""
    answers = directory / "answers.jsonl"
    rows = {row["_row"]: row for row in lines(answers)}
    sums = [rows[i] for i in range(200)]
    assert all(row["generated_text"] == str(row["sum"]) for row in sums)
    assert "max_model_len" in rows[200]["error"] and len(rows) == 201
    assert [json.loads(blocks("prompts_file", "json")[0])] == sums[199:]

    content = answers.read_bytes()
    torn = content[: content.index(b"\n", len(content) // 2) + 9]
    answers.write_bytes(torn)
    again = run("prompts_file", directory=directory)
    lost = 201 - torn.count(b"\n")
    assert again == printed.replace("201 of them new", f"{lost} of them new")
    assert answers.read_bytes().startswith(torn[:-8])
    assert {row["_row"]: row for row in lines(answers)} == rows
    assert len(lines(answers)) == 201, "each row once"


def extraction(directory: Path, printed: str, run: Runner) -> None:
    """Each object has the form of the schema, by another implementation of it."""
    objects = [ast.literal_eval(line) for line in printed.splitlines()]
    found = names("extraction")
    assert len(objects) == len(found["TEXTS"])
    for each in objects:
        jsonschema.validate(each, found["SCHEMA"])
        assert list(each) == found["SCHEMA"]["required"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**objects[0], "age": 121}, found["SCHEMA"])


def embeddings(directory: Path, printed: str, run: Runner) -> None:
    """Neighbours are of the query's kind: they begin and end as it does."""
    kinds = [line.strip().rpartition("  ")[2] for line in printed.splitlines()]
    words = ["".join(c for c in kind if not c.isdigit())[:8] for kind in kinds]
    assert words == ["reverse:"] * 4 + ["count fr"] * 4 + ["+="] * 4


def best_of_n(directory: Path, printed: str, run: Runner) -> None:
    """Check that choosing helps: the questions' samples do not err together."""
    first, commonest, likeliest, at_best = (
        int(line.split(": ")[1].split()[0]) for line in printed.splitlines()
    )
    assert 0.4 < first / 200 < 0.6
    assert first * 1.5 < min(commonest, likeliest) <= at_best


def synthetic_data(directory: Path, printed: str, run: Runner) -> None:
    """Check that all kept answers are right, and that some sampled ones are not."""
    examples = lines(directory / "synthetic.jsonl")
    for example in examples:
        question, answer = example["messages"]
        a, b = question["content"].removesuffix("=").split("+")
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert int(answer["content"]) == int(a) + int(b)
    right, _, total, *_ = printed.split()
    assert len(examples) == 100 < int(right) < int(total) == 400
    assert examples[0] == json.loads(blocks("synthetic_data", "json")[0])


def nothing_more(directory: Path, printed: str, run: Runner) -> None:
    """The page says it all."""


CHECKS: dict[str, Callable[[Path, str, Runner], None]] = {
    "best_of_n": best_of_n,
    "data_parallel": nothing_more,
    "embeddings": embeddings,
    "extraction": extraction,
    "prompts_file": prompts_file,
    "rerank": nothing_more,  # below
    "scoring": nothing_more,  # below
    "synthetic_data": synthetic_data,
}


@pytest.fixture(name="run", scope="module")
def run_fixture() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.mark.slow  # they take seconds each; CI runs them
@pytest.mark.parametrize("name", CHECKS)
def test_script_prints_what_its_page_says(name: str, tmp_path: Path, run: Runner) -> None:
    args, output = first_command(name)
    printed = run(name, *args, directory=tmp_path)
    assert printed == output
    CHECKS[name](tmp_path, printed, run)


NO_PILLOW = (
    "import importlib.util as u, runpy; find = u.find_spec; "
    "u.find_spec = lambda name: None if name == 'PIL' else find(name)"
)


@pytest.mark.slow
def test_pictures_have_captions(tmp_path: Path, run: Runner) -> None:
    """As the page says, from the script that makes a model; the torn one has an error."""
    pytest.importorskip("PIL")
    make = ROOT / "scripts" / "make_tiny_vision.py"
    subprocess.run([sys.executable, str(make)], cwd=tmp_path, env=environment(), check=True)
    args, said = first_command("captions")
    assert run("captions", *args, directory=tmp_path) == said
    rows = {row["custom_id"]: row for row in lines(tmp_path / "captions.jsonl")}
    assert len(rows) == 13 and "truncated" in rows.pop("torn.png")["error"]
    assert all(row["error"] is None and row["num_prompt_tokens"] > 50 for row in rows.values())
    (tmp_path / ".printed").unlink()
    again = run("captions", *args, directory=tmp_path)
    assert again == said.replace("13 of them new", "0 of them new")
    (tmp_path / "other").mkdir()
    command = [sys.executable, str(SCRIPTS["captions"]), *args, "--folder", "other"]
    ran = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert "was begun by another job: folder was" in ran.stderr


def test_captions_are_of_all_formats_that_are_read() -> None:
    """Files of some were passed over in silence."""
    image = pytest.importorskip("PIL.Image")
    kinds = image.registered_extensions()
    suffixes = names("captions")["SUFFIXES"]
    assert {kinds.get(suffix) for suffix in suffixes} | {"AVIF"} == {*FORMATS}


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    """The script that makes pictures writes nothing then, nor without Pillow."""
    pytest.importorskip("PIL")
    own = tmp_path / "tiny-pictures" / "00.jpg"
    own.parent.mkdir()
    own.write_bytes(b"mine")
    make = [sys.executable, str(ROOT / "scripts" / "make_tiny_vision.py")]
    without = [sys.executable, "-c", f"{NO_PILLOW}; runpy.run_path({make[1]!r}, {{}}, '__main__')"]
    for command, said in (
        (make, "tiny-pictures is there already: remove it, or name another by --pictures\n"),
        (without, 'this script needs Pillow: pip install "pillow>=10"\n'),
    ):
        ran = subprocess.run(
            command, check=False, cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        assert ran.returncode == 1 and ran.stderr.endswith(said) and "Traceback" not in ran.stderr
        assert own.read_bytes() == b"mine" and [*tmp_path.iterdir()] == [own.parent]


@pytest.mark.slow
def test_the_reward_rises(tmp_path: Path) -> None:
    """As on the page, but for rounding. PyTorch differentiates in no fork."""
    args, said = first_command("grpo")
    command = [sys.executable, str(SCRIPTS["grpo"]), *args]
    printed = subprocess.run(
        command, cwd=tmp_path, env=environment(), check=True, capture_output=True, text=True
    ).stdout
    for text in (said, printed):
        rewards = [float(line.rpartition(" ")[2]) for line in text.splitlines()]
        assert len(rewards) == 12 and rewards[0] < 0.4 and min(rewards[-3:]) > 0.9


def test_scores_are_those_of_transformers(reference: Any) -> None:
    """Also of a text that is longer than a piece, where each token counts once."""
    script = names("scoring")
    text = " ".join(map(str, range(700)))
    LENGTH, CONTEXT = script["LENGTH"], script["CONTEXT"]
    assert len(text) > 2 * LENGTH

    def logprobs(text: str) -> list[float]:
        ids = torch.tensor(list(text.encode()))  # [T]: a token is a byte
        with torch.no_grad():
            logits = reference(ids[None]).logits[0, :-1].double()  # [T - 1, V]
        return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()

    expected = logprobs(text[:LENGTH])
    while len(expected) < len(text) - 1:
        begin = len(expected) + 1 - CONTEXT
        expected += logprobs(text[begin : begin + LENGTH])[CONTEXT - 1 :]
    with LLM(TINY, device="cpu") as llm:
        chosen = script["choose"](llm, "127+345=", ["472", "8"])
        per_token, bits = script["perplexity"](llm, text)
    assert chosen == pytest.approx(
        [sum(logprobs("127+345=472")[7:]), sum(logprobs("127+345=8")[7:])], abs=1e-3
    )
    assert per_token == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)
    assert bits == pytest.approx(-sum(expected) / math.log(2) / len(text), rel=1e-4)


def test_reranking_is_that_of_transformers(reference: Any) -> None:
    """A softmax over two logits, also after a document that is cut."""
    script = names("rerank")
    query, documents = "What rises?", [*script["DOCUMENTS"], "sea " * 400]
    with LLM(TINY, device="cpu", max_model_len=800) as llm:
        tokenizer, limit = llm.get_tokenizer(), llm.max_model_len
        found = script["score"](llm, query, documents)
    assert len(set(found)) == 4

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    for score, document in zip(found, documents, strict=True):
        asked = f"<Instruct>: {script['TASK']}\n<Query>: {query}\n<Document>: {document}"
        end = ids(script["END"])
        text = [*ids(script["BEGIN"]), *ids(asked)][: limit - 1 - len(end)] + end
        assert (len(text) == limit - 1) == (document is documents[-1])
        with torch.no_grad():
            logits = reference(torch.tensor([text])).logits[0, -1].double()
        pair = logits[[ord("y"), ord("n")]]  # a token is a byte
        assert score == pytest.approx(pair.softmax(0)[0].item(), abs=1e-5)


def test_the_check_of_synthetic_data_refuses_what_is_wrong() -> None:
    is_right = names("synthetic_data")["is_right"]
    assert is_right("472", 127, 345) and is_right("127 + 345 is 1,472", 1127, 345)
    assert not any(is_right(answer, 127, 345) for answer in ("", "a", "471", "472, or 473"))


def test_pages_are_those_of_the_scripts() -> None:
    assert PAGES.keys() == SCRIPTS.keys()
    assert (ROOT / "examples" / "web_stream.html").is_file()
