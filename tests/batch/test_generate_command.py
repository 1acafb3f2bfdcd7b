"""`nanovllm generate`: every ending that it documents, in processes of its own."""

import itertools
import json
import os
import random
from pathlib import Path

import pytest
from forks import Forks, size_of

from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main

SMALL = (
    *("--device", "cpu", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"),
    *("--max-model-len", "128", "--num-kvcache-blocks", "64", "--kvcache-block-size", "16"),
)
GREEDY = ("--temperature", "0", "--max-tokens", "8")
COUNT = 60


@pytest.fixture(scope="module")
def command(tiny):
    forks = Forks()
    yield lambda *argv, **call: forks("generate", "--model", tiny, *SMALL, *argv, **call)
    forks.close()


@pytest.fixture(scope="module")
def prompts():
    numbers = random.Random(0)
    return [f"{numbers.randint(1, 999)}+{numbers.randint(1, 999)}=" for _ in range(COUNT)]


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    with LLM(tiny, device="cpu") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture
def rows(tmp_path, prompts):
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return file


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def answers(values):
    """The texts of results in the order of their rows; each must be there once."""
    ordered = sorted(values, key=lambda value: value["_row"])
    assert [value["_row"] for value in ordered] == [*range(len(ordered))]
    return [value["generated_text"] for value in ordered]


def table(path: Path) -> list[dict]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def test_killed_and_started_again_each_row_is_there_once(
    command, tmp_path, rows, prompts, expected
):
    """Killed by SIGKILL, by Ctrl-C and by SIGTERM, within a line."""
    path, moments = tmp_path / "out.jsonl", random.Random(1)
    size = sum(170 + 2 * len(prompt) for prompt in prompts)
    signals = {"SIGKILL": -9, "SIGINT": 130, "SIGTERM": 143}
    for i, (name, code) in enumerate(signals.items()):
        at = max(1, int((i + moments.random()) / 4 * size))
        found, said = command(
            "--input", rows, "--output", path, *GREEDY, signal=name, at=max(at, size_of(path) + 1)
        )
        assert found == code, said
        if name != "SIGKILL":
            assert path.read_bytes().endswith(b"}\n")
            assert "the same command continues from here" in said
    before = path.read_bytes().count(b"\n")
    assert 0 < before < COUNT
    code, said = command("--input", rows, "--output", path, *GREEDY)
    assert code == 0, said
    assert f"{COUNT} of {COUNT} rows" in said and f"{COUNT - before} rows in" in said
    assert answers(lines(path)) == expected
    found = path.stat()
    assert command("--input", rows, "--output", path, *GREEDY)[0] == 0
    assert path.stat() == found, "nothing was left to do"


@pytest.mark.slow  # parts and their ends are in test_sink.py
def test_killed_parquet_is_whole_too(command, tmp_path, rows, expected):
    path = tmp_path / "out.parquet"
    options = ("--input", rows, "--output", path, *GREEDY)
    for at in (1, 4_000):
        assert command(*options, signal="SIGKILL", at=at, part_rows=10)[0] == -9
        assert all(row["error"] is None for row in table(path))
    kept = len(table(path))
    assert 0 < kept < COUNT and kept % 10 == 0
    assert command(*options, part_rows=10)[0] == 0
    assert answers(table(path)) == expected


def test_some_rows_are_wrong(command, tmp_path):
    """They carry their errors, and are tried again when that is asked for."""
    file, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [b'{"custom_id": "a", "prompt": "127+345=", "mine": 1}', b"{", b'{"prompt": "\xff"}']
    rows += [b'{"custom_id": "a", "prompt": "1+1="}', b'{"prompt": "%s"}' % (b"x" * 500)]
    file.write_bytes(b"\n".join(rows) + b"\n")
    options = ("--input", file, "--output", path, *GREEDY)
    code, said = command(*options)
    assert code == 1 and "5 of 5 rows" in said and "4 with errors" in said
    assert "--retry-errors" in said
    assert "the first error of this run: row 1 (counting from 0): line must be JSON" in said
    by_row = {line["_row"]: line for line in lines(path)}
    assert by_row[0]["generated_text"] == "472" and by_row[0]["mine"] == 1
    says = ("line must be JSON", "byte 0xff", "`custom_id` must differ", "max_model_len")
    for i, words in enumerate(says, 1):
        assert words in by_row[i]["error"] and by_row[i]["generated_text"] is None
    assert command(*options)[0] == 1
    file.write_bytes(b"\n".join([*rows[:3], b'{"custom_id": "b", "prompt": "1+1="}']) + b"\n")
    code, said = command(*options, "--retry-errors")
    assert code == 1 and "4 of 4 rows" in said and "2 with errors" in said
    assert sorted(line["_row"] for line in lines(path)) == [0, 1, 2, 3]


def test_rows_that_were_edited(command, tmp_path):
    """Are refused before anything is computed, or computed again if that is asked for."""
    file, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = ["127+345=", "reverse: hello =", "1+1="]

    def write(prompts):
        rows = [{"custom_id": f"r{i}", "prompt": prompt} for i, prompt in enumerate(prompts)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(prompts[:2])
    options = ("--input", file, "--output", path, *GREEDY)
    assert command(*options)[0] == 0
    before = path.read_bytes()
    write([prompts[2], prompts[1], prompts[2]])  # the second is as it was
    code, said = command(*options)
    assert code == 2 and said.count("\n") == 1
    assert "row 0 (counting from 0) must be unchanged" in said and "`custom_id` 'r0'" in said
    assert "--recompute-changed" in said and path.read_bytes() == before
    piped = ("--input", "-", *options[2:])
    code, said = command(*piped, "--recompute-changed", stdin=str(file))
    assert code == 2 and "--recompute-changed reads the input twice" in said
    code, said = command(*options, "--recompute-changed")
    assert code == 0, said
    assert "changed rows, computed again: 1\n" in said
    assert "3 of 3 rows" in said and "2 rows in" in said
    texts = {line["custom_id"]: line["generated_text"] for line in lines(path)}
    assert (texts["r1"], len(lines(path))) == ("olleh", 3)
    write([prompts[2], prompts[1], "reverse: engine =", "reverse: token ="])
    code, said = command(*piped, stdin=str(file))  # the third has changed
    assert code == 2 and "`custom_id` 'r2'" in said and len(lines(path)) == 3
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join([rows[3], *rows[:3]]))  # the new one comes first
    before = path.read_bytes()
    code, said = command(*options)
    assert code == 2 and "`custom_id` 'r2'" in said and path.read_bytes() == before
    code, said = command(*piped, stdin=str(file))
    assert code == 4 and "`custom_id` 'r2'" in said and "Traceback" not in said


def test_numbers_that_json_has_not(command, tmp_path):
    """Python reads and writes NaN, and other readers stop there."""
    file, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "127+345=", "mine": NaN, "more": {"a": [1.5, -Infinity]}}\n')
    options = ("--input", file, "--output", path, *GREEDY)
    assert command(*options)[0] == 0
    [line] = path.read_text().splitlines()
    value = json.loads(line, parse_constant=pytest.fail)
    assert value["generated_text"] == "472"
    assert (value["mine"], value["more"]) == (None, {"a": [1.5, None]})
    assert command(*options)[0] == 0


def test_openais_format_and_shards(command, tmp_path):
    file, body = tmp_path / "in.jsonl", {"model": "m", "prompt": "127+345=", "max_tokens": 5}
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i in range(5)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for i in (1, 2):
        path = tmp_path / f"{i}.jsonl"
        code, said = command("--input", file, "--output", path, "--shard", f"{i}/2", *GREEDY)
        assert code == 0, said
        found |= {line["custom_id"]: line for line in lines(path)}
    assert sorted(found) == [row["custom_id"] for row in rows]
    for line in found.values():
        assert line["response"]["body"]["choices"][0]["text"] == "472" and line["error"] is None
    code, said = command("--input", file, "--output", path, "--shard", "1/2", *GREEDY)
    assert code == 2 and 'shard was "2/2" and is "1/2"' in said


def test_pipes_and_texts(command, tmp_path, prompts, expected):
    """Standard input and output; texts are in order."""
    file, out = tmp_path / "in.txt", tmp_path / "stdout"
    file.write_text("\n".join(prompts[:30]))
    out.touch()
    options = ("--input-format", "text", "--output-format", "text", *GREEDY)
    assert command("--input", "-", *options, stdin=str(file), stdout=str(out))[0] == 0
    assert out.read_text().splitlines() == expected[:30]


def test_nobody_reads_and_the_disk_is_full(command, rows):
    code, said = command("--input", rows, *GREEDY, closed=True)
    assert (code, said) == (141, "")
    code, said = command("--input", rows, *GREEDY, stdout="/dev/full")
    assert code == 4 and "No space left on device" in said and "Traceback" not in said


def test_mistakes_end_with_one_line_and_nothing_computed(command, tmp_path, rows):
    out, folder = tmp_path / "out.jsonl", tmp_path / "folder.jsonl"
    folder.mkdir()
    for options, says in (
        (("--input", rows, "--output", "x.csv"), "`output_format` must be given"),
        (("--input", rows, "--output", "x.txt"), "got text for 'x.txt': write JSON lines"),
        (("--input", rows, "--output", folder), "a directory with the name of a file"),
        (("--input", rows, "--output", out, "--top-p", "3"), "`top_p` must be"),
        (("--input", rows, "--retry-errors"), "--retry-errors needs an output"),
        (("--input", tmp_path / "none.jsonl"), "No such file"),
        (("--input", rows, "--output", tmp_path / "none" / "out.jsonl"), "No such file"),
        (("--input", rows, "--output", rows), "is not the output of a job"),
    ):
        code, said = command(*options)
        assert code == 2 and says in said and said.count("\n") == 1, said
    descriptor = os.open(out, os.O_CREAT | os.O_RDWR)
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX)
    code, said = command("--input", rows, "--output", out)
    assert code == 2 and "another process" in said
    os.close(descriptor)


def test_an_engine_that_fails_leaves_what_was_finished(
    tiny, tmp_path, rows, expected, monkeypatch, capsys
):
    path, step, steps = tmp_path / "out.jsonl", LLM.step, itertools.count()
    command = ("generate", "--model", tiny, *SMALL, *GREEDY, "--input", rows, "--output", path)

    def fails(llm):
        if next(steps) == 20:
            raise RuntimeError("the device is gone")
        return step(llm)

    monkeypatch.setattr(LLM, "step", fails)
    assert main([*map(str, command)]) == 3
    said = capsys.readouterr().err
    assert "RuntimeError: the device is gone" in said
    assert "the same command continues from here" in said
    assert 0 < len(lines(path)) < COUNT
    assert main([*map(str, command)]) == 0
    assert answers(lines(path)) == expected


@pytest.mark.slow
def test_thousands_of_rows_killed_ten_times(tiny, tmp_path):
    """Against a run that was not interrupted."""
    numbers, file = random.Random(2), tmp_path / "in.jsonl"
    with file.open("w") as stream:
        for i in range(3000):
            prompt = f"{numbers.randint(1, 999)}+{numbers.randint(1, 999)}="
            named = {"custom_id": f"r{i}"} if i % 2 else {}
            stream.write(json.dumps({**named, "prompt": prompt, "max_tokens": 3 + i % 6}) + "\n")
    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    forks = Forks()
    options = ("--device", "cpu", "--max-num-seqs", "128", "--temperature", "0", "--input", file)
    assert forks("generate", "--model", tiny, *options, "--output", whole)[0] == 0
    moments = sorted(numbers.sample(range(whole.stat().st_size), 10))
    print("killed at", moments, "of", whole.stat().st_size, "bytes")
    for at in moments:
        code, _ = forks(
            "generate", "--model", tiny, *options, "--output", path, signal="SIGKILL", at=at
        )
        assert code == -9
        print(path.stat().st_size, "bytes,", path.read_bytes().count(b"\n"), "lines")
    assert forks("generate", "--model", tiny, *options, "--output", path)[0] == 0
    forks.close()
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    assert len(answers(lines(path))) == 3000
