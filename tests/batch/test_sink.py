"""The output of a job that is killed, and comes back. No engine here: results are made up."""

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import CompletionOutput, RequestOutput
from nanovllm.batch import Result, ResumableSink, read_rows
from nanovllm.batch.parts import Parts
from nanovllm.batch.rows import as_rows
from nanovllm.batch.sink import StreamSink

FORMATS = ("jsonl", "parquet")
SEVERAL = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def rows_of(directory: Path, count: int, fails=()):
    file = directory / "in.jsonl"
    rows = [{"prompt": f"p{i} ä\n", "fails": i in fails} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*read_rows(file)]


def answer(row, error=None):
    completion = CompletionOutput(0, f"a{row.number}\n\\ü", [1, 2], "stop")
    output = RequestOutput(row.number, None, [1], [completion], True, 0)
    return Result(row, error=error) if error else Result(row, output)


def finish(path, rows, count=None, job=None, **options):
    """Answer rows that are not finished, at most so many; how many there were."""
    with ResumableSink(path, job, **options) as sink:
        left = [*sink.unfinished(iter(rows))]
        for row in left[:count]:
            sink.write(answer(row, "bad" if row.fields.get("fails") else None))
    return len(left)


def numbers(path):
    """Numbers of the rows in the output, as it names them."""
    if path.suffix == ".jsonl":
        return [json.loads(line)["_row"] for line in path.read_text("utf-8").splitlines()]
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).column("_row").to_pylist() if [*path.iterdir()] else []


def output(directory, kind):
    return directory / f"out.{kind}"


@SEVERAL
@given(st.data())
def test_cut_at_any_byte_the_output_is_completed(tmp_path_factory, data):
    """A kill, a full disk or a power cut leaves the beginning of the written data, perhaps followed
    by zeros.
    """
    directory = tmp_path_factory.mktemp("cut")
    rows, path = rows_of(directory, 6), output(directory, "jsonl")
    finish(path, rows)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    zeros = data.draw(st.sampled_from([0, 1, 100]))
    path.write_bytes(whole[:cut] + bytes(zeros))
    assert finish(path, rows) == 6 - whole[:cut].count(b"\n")
    assert numbers(path) == [*range(6)]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", FORMATS)
def test_a_job_goes_on_where_it_ended(tmp_path, kind):
    rows, path = rows_of(tmp_path, 10), output(tmp_path, kind)
    assert finish(path, rows, 4) == 10
    assert finish(path, rows, 3) == 6
    assert finish(path, rows) == 3
    assert finish(path, rows) == 0
    assert numbers(path) == [*range(10)]


def test_a_part_that_was_being_written_is_written_anew(tmp_path):
    rows, path = rows_of(tmp_path, 6), output(tmp_path, "parquet")
    finish(path, rows, 4)
    (path / ".part.nanovllm.tmp").write_bytes(b"PAR1")
    assert finish(path, rows) == 2
    assert numbers(path) == [*range(6)]
    begun = output(tmp_path, "parquet").with_name("begun.parquet")
    begun.mkdir()
    (begun / ".part.nanovllm.tmp").write_bytes(b"PAR1")
    ResumableSink(begun, {"n": 1}).close()
    ResumableSink(begun, {"n": 2}).close()  # there is no result of the other yet
    assert sorted(file.name for file in path.iterdir()) == [
        "part-000000.parquet",
        "part-000001.parquet",
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_errors_are_kept_and_tried_again_when_that_is_asked_for(tmp_path, kind):
    rows, path = rows_of(tmp_path, 8, fails=(2, 5)), output(tmp_path, kind)
    finish(path, rows)
    assert finish(path, rows) == 0
    with ResumableSink(path) as sink:
        assert (sink.num_finished, sink.num_errors) == (8, 2)
    with ResumableSink(path, retry_errors=True) as sink:
        left = [*sink.unfinished(iter(rows))]
        assert [row.number for row in left] == [2, 5]
        assert (sink.num_finished, sink.num_errors, sink.num_strangers) == (6, 0, 0)
        sink.write(answer(left[0]))  # and it is killed before the other
    assert finish(path, rows) == 1
    assert sorted(numbers(path)) == [*range(8)]


def named_rows(directory, prompts, is_openai=False):
    """Rows with the ids "r0", "r1", ..."""
    rows = [{"custom_id": f"r{i}", "prompt": prompt} for i, prompt in enumerate(prompts)]
    if is_openai:
        ask = {"method": "POST", "url": "/v1/completions"}
        rows = [{"custom_id": row.pop("custom_id"), **ask, "body": row} for row in rows]
    file = directory / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*read_rows(file)]


def contents(path):
    """All that lies in an output."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file.read_bytes() for file in files]


@pytest.mark.parametrize("is_openai", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_that_was_edited_is_refused(tmp_path, kind, is_openai):
    """Under the same `custom_id`. The old result stayed, and nothing was said."""
    path = output(tmp_path, kind)
    finish(path, named_rows(tmp_path, "abcd", is_openai), 3)
    before = contents(path)
    edited = named_rows(tmp_path, "aBcd", is_openai)
    with ResumableSink(path) as sink:
        for look in (sink.check, lambda rows: [*sink.unfinished(rows)]):
            with pytest.raises(ValueError) as caught:
                look(iter(edited))
            said = str(caught.value)
            assert said.startswith("row 1 (counting from 0) must be unchanged since its result in ")
            assert "got a changed one under the `custom_id` 'r1': choose another output" in said
            assert said.endswith("`drop_changed`")
        sink.check(named_rows(tmp_path, "abcD", is_openai))  # which has no result yet
    assert contents(path) == before
    same = [json.dumps(dict(reversed(row.fields.items()))) + "\n" for row in edited]
    same[1] = same[1].replace("B", "b")
    (tmp_path / "in.jsonl").write_text("".join(same))
    assert finish(path, [*read_rows(tmp_path / "in.jsonl")]) == 1


@pytest.mark.parametrize("is_openai", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_that_were_edited_are_computed_again(tmp_path, kind, is_openai, monkeypatch):
    monkeypatch.setattr("nanovllm.batch.parts.PART_ROWS", 2)
    path, answered = output(tmp_path, kind), []
    finish(path, named_rows(tmp_path, "abcde", is_openai), 4)
    rows = named_rows(tmp_path, "aBCdE", is_openai)
    with ResumableSink(path) as sink:
        assert sink.drop_changed(iter(rows)) == 2
        assert sink.num_finished == 2
        for row in sink.unfinished(iter(rows)):
            answered.append(row.number)
            sink.write(answer(row))
        assert sink.num_finished == 5 and sink.num_strangers == 0
    assert answered == [1, 2, 4]
    with ResumableSink(path) as sink:
        assert sink.drop_changed(iter(rows)) == 0
        assert [*sink.unfinished(iter(rows))] == []
    if not is_openai:
        assert sorted(numbers(path)) == [*range(5)]


def test_a_row_that_failed_may_be_mended(tmp_path):
    """Its result is taken out before rows are compared."""
    path = output(tmp_path, "jsonl")
    first, second = named_rows(tmp_path, "ab")
    with ResumableSink(path) as sink:
        sink.write(answer(first))
        sink.write(answer(second, "too long"))
    mended = named_rows(tmp_path, "aB")
    with pytest.raises(ValueError, match="`custom_id` 'r1'"):
        finish(path, mended)
    assert finish(path, mended, retry_errors=True) == 1


@pytest.mark.parametrize("is_openai", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_results_without_a_hash_of_their_rows_go_on(tmp_path, kind, is_openai):
    """Results from before there was a hash: nobody can tell their rows."""
    path, rows = output(tmp_path, kind), named_rows(tmp_path, "abc", is_openai)
    finish(path, rows, 2)
    if kind == "parquet":
        import pyarrow.parquet

        [file] = path.iterdir()
        table = pyarrow.parquet.read_table(file)
        keys = pyarrow.array([key[:32] for key in table.column("_key").to_pylist()])
        table = table.set_column(table.schema.get_field_index("_key"), "_key", keys)
        pyarrow.parquet.write_table(table, file)
    else:
        text = path.read_text("utf-8")
        short = re.sub(r'(?<=_key": ")(\w{32})\w{16}|(?<=batch_req_)(\w{32})\w{16}', r"\1\2", text)
        assert len(short) == len(text) - 32
        path.write_text(short, "utf-8")
    with ResumableSink(path) as sink:
        assert [row.number for row in sink.unfinished(named_rows(tmp_path, "aBc", is_openai))] == [
            2
        ]
    assert finish(path, rows) == 1
    with pytest.raises(ValueError, match="`custom_id` 'r2'"):  # of which it is known
        finish(path, named_rows(tmp_path, "abC", is_openai))


def test_another_job_is_refused_and_what_differs_is_named(tmp_path):
    rows, path = rows_of(tmp_path, 3), output(tmp_path, "jsonl")
    job = {"model": {"weights": "1"}, "sampling": {"temperature": 0.0, "n": 1}}
    finish(path, rows, job=job)
    before = path.read_bytes()
    for change, says in (
        ({"sampling": {"temperature": 0.5, "n": 1}}, r"sampling\.temperature was 0\.0 and is 0\.5"),
        ({"model": {"weights": "2"}}, r'model\.weights was "1" and is "2"'),
        ({"shard": "1/2"}, 'shard was null and is "1/2"'),
    ):
        with pytest.raises(ValueError, match=says):
            ResumableSink(path, {**job, **change})
    assert path.read_bytes() == before
    finish(path, rows, job=job)
    path.unlink()  # begun anew
    assert finish(path, rows, job={}) == 3


def test_what_is_no_output_of_a_job_is_left_alone(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text("my notes")
    with pytest.raises(ValueError, match="is not the output of a job"):
        ResumableSink(path)
    assert path.read_text() == "my notes"
    (tmp_path / "data.parquet").write_text("PAR1")
    with pytest.raises(ValueError, match="must be a directory"):
        ResumableSink(tmp_path / "data.parquet")


def test_a_line_that_was_changed_is_named(tmp_path):
    rows, path = rows_of(tmp_path, 3), output(tmp_path, "jsonl")
    finish(path, rows)
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"{}\n" + third)
    with pytest.raises(ValueError, match=r"line 2 of .*must be a result"):
        ResumableSink(path)
    hole = first[:60] + bytes(20) + first[80:]  # where a disk lost what was not synced
    path.write_bytes(hole + third)
    with pytest.raises(ValueError, match=r"line 1 of .*must be a result"):
        ResumableSink(path)
    path.write_bytes(third + hole)
    assert finish(path, rows) == 2
    path.write_bytes(first + first)
    with pytest.raises(ValueError, match="twice"):
        ResumableSink(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_one_output_is_for_one_process(tmp_path, kind):
    path = output(tmp_path, kind)
    with ResumableSink(path), pytest.raises(BlockingIOError, match="another process"):
        ResumableSink(path)
    if kind == "jsonl":  # the file has been replaced, and is held still
        rows = rows_of(tmp_path, 2, fails=(0,))
        finish(path, rows)
        with ResumableSink(path, retry_errors=True), pytest.raises(BlockingIOError):
            ResumableSink(path)
    finish(path, rows_of(tmp_path, 2))


def test_rows_that_are_gone_from_the_input_are_counted(tmp_path):
    rows, path = rows_of(tmp_path, 5), output(tmp_path, "jsonl")
    finish(path, rows)
    with ResumableSink(path) as sink:
        assert [*sink.unfinished(iter(rows[:3]))] == []
        assert sink.num_strangers == 2


FULL = """
import json, resource, sys
from nanovllm import RequestOutput, CompletionOutput
from nanovllm.batch import ResumableSink, Result, read_rows

rows = [*read_rows(sys.argv[1])]
written = 0
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
try:
    with ResumableSink(sys.argv[2]) as sink:
        for row in sink.unfinished(iter(rows)):
            completion = CompletionOutput(0, "a" * 100, [1], "stop")
            sink.write(Result(row, RequestOutput(0, None, [1], [completion], True, 0)))
            written += 1
except OSError as error:
    print(written, error.errno)
"""


def test_a_row_is_written_once(tmp_path):
    """Or the output, which must have a row once, could not be opened again."""
    rows, path = rows_of(tmp_path, 3), output(tmp_path, "jsonl")
    finish(path, rows, 1)
    with ResumableSink(path) as sink:
        for row in sink.unfinished(iter(rows)):
            sink.write(answer(row))
            with pytest.raises(ValueError, match=f"row {row.number} must be written once"):
                sink.write(answer(row))
        with pytest.raises(ValueError, match="row 0 must"):
            sink.write(answer(rows[0]))
        assert (sink.num_finished, sink.num_strangers) == (3, 0)
        assert [*sink.unfinished(rows[1:])] == []
        assert sink.num_strangers == 1
    assert numbers(path) == [0, 1, 2]
    assert finish(path, rows) == 0


def test_rows_are_what_run_takes(tmp_path):
    path = tmp_path / "out.jsonl"
    assert finish(path, ["a", {"prompt": "b"}, "c"], 2) == 3
    assert finish(path, ["a", {"prompt": "b"}, "c"]) == 1


@pytest.mark.parametrize("given", [None, "text"])
def test_texts_are_for_streams_alone(tmp_path, given):
    """A line of text cannot say whose it is, so no job could go on over such a file."""
    with pytest.raises(ValueError, match=r"`output_format` must be .*got text .*write JSON lines"):
        ResumableSink(tmp_path / ("out.jsonl" if given else "out.txt"), output_format=given)
    assert [*tmp_path.iterdir()] == []


def test_a_link_stays_one_and_the_file_keeps_its_mode(tmp_path):
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "out.jsonl", tmp_path / "out.jsonl"
    link.symlink_to(real)
    rows = rows_of(tmp_path, 3, fails=(1,))
    finish(link, rows)
    real.chmod(0o640)
    with ResumableSink(link, retry_errors=True) as sink:
        assert sink.num_finished == 2
    assert link.is_symlink() and numbers(real) == [0, 2]
    assert real.stat().st_mode & 0o777 == 0o640
    assert finish(real, rows) == 1


def test_files_of_others_beside_the_output_are_left_alone(tmp_path):
    rows, path = rows_of(tmp_path, 2, fails=(0,)), output(tmp_path, "jsonl")
    theirs = [tmp_path / "out.jsonl.tmp", tmp_path / "out.jsonl.job.json.tmp"]
    for file in theirs:
        file.write_text("mine")
    finish(path, rows)
    ResumableSink(path, retry_errors=True).close()
    assert [file.read_text() for file in theirs] == ["mine"] * 2
    names = {"in.jsonl", "out.jsonl", "out.jsonl.job.json", *(file.name for file in theirs)}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_without_file_locks_outputs_are_refused(tmp_path):
    code = """
import sys
sys.modules["fcntl"] = None
from nanovllm.batch import ResumableSink
import nanovllm.cli.main
ResumableSink(sys.argv[1])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ValueError" in done.stderr and "must be written on Linux or macOS" in done.stderr


def test_a_disk_that_is_full_leaves_whole_results(tmp_path):
    """A limit of the size of files stands for it: the call that reaches it writes a part, too."""
    rows_of(tmp_path, 60)
    path = output(tmp_path, "jsonl")
    command = [sys.executable, "-c", FULL, str(tmp_path / "in.jsonl"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written, errno = map(int, done.stdout.split())
    assert 0 < written < 60 and errno
    data = path.read_bytes()
    assert data.endswith(b"\n") and data.count(b"\n") == written


def test_a_failed_write_is_not_in_the_way_of_the_next(tmp_path, monkeypatch):
    """The disk has room again: the same sink goes on after the last whole line."""
    rows, path = rows_of(tmp_path, 3), output(tmp_path, "jsonl")
    write, parts = os.write, []

    def fails_in_the_middle(fd, data):
        if len(parts) == 1:
            raise OSError(28, "No space left on device")
        parts.append(write(fd, data[:5]))
        return parts[-1]

    with ResumableSink(path) as sink:
        monkeypatch.setattr(os, "write", fails_in_the_middle)
        with pytest.raises(OSError, match="No space"):
            sink.write(answer(rows[0]))
        monkeypatch.setattr(os, "write", write)
        assert path.read_bytes() == b""
        for row in rows:
            sink.write(answer(row))
    assert numbers(path) == [0, 1, 2]
    assert finish(path, rows) == 0


def test_a_part_that_cannot_be_written_leaves_the_others(tmp_path, monkeypatch):
    rows, path = rows_of(tmp_path, 5), output(tmp_path, "parquet")
    finish(path, rows, 2)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        finish(path, rows)
    monkeypatch.undo()
    assert [file.name for file in path.iterdir()] == ["part-000000.parquet"]
    assert finish(path, rows) == 3
    assert sorted(numbers(path)) == [*range(5)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=3,
)


def in_json(value):
    """Numbers that are none are null there."""
    if isinstance(value, list):
        return [*map(in_json, value)]
    if isinstance(value, dict):
        return {key: in_json(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


ALIKE = st.sampled_from([st.integers(), st.floats(), st.booleans(), st.text(), JSON])


@settings(parent=SEVERAL, max_examples=50)
@given(data=st.data(), stop=st.integers(0, 8))
def test_parts_are_one_table_of_the_same_values(tmp_path_factory, data, stop):
    """Columns may come later, be of another type later, or of mixed types in one part."""
    import pyarrow.parquet

    directory = tmp_path_factory.mktemp("values")
    halves = [
        data.draw(st.lists(st.none() | kind, min_size=4, max_size=4))
        for kind in (data.draw(ALIKE), data.draw(ALIKE))
    ]
    fields = [{} if data.draw(st.booleans()) else {"mine": v} for half in halves for v in half]
    file, path = directory / "in.jsonl", directory / "out.parquet"
    file.write_text("".join(json.dumps({"prompt": "p", **mine}) + "\n" for mine in fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.batch.parts.PART_ROWS", 2)
        patch.setattr(os, "fsync", lambda fd: None)  # not what this is about, and slow
        finish(path, [*read_rows(file)], stop)
        finish(path, [*read_rows(file)])
    table = pyarrow.parquet.read_table(path)
    assert table.column("_row").to_pylist() == [*range(8)]
    found = table.column("mine").to_pylist() if "mine" in table.column_names else [None] * 8
    for cell, mine in zip(found, fields, strict=True):
        expected = mine.get("mine")
        if isinstance(expected, (list, dict)):
            expected = in_json(expected)
        is_json = isinstance(cell, str) and not isinstance(expected, str)
        value = json.loads(cell) if is_json else cell
        assert isinstance(value, bool) == isinstance(expected, bool)
        assert value == expected or (value != value and expected != expected)  # noqa: PLR0124


def test_types_stay_where_they_can(tmp_path, monkeypatch):
    import pandas

    monkeypatch.setattr("nanovllm.batch.parts.PART_ROWS", 2)
    columns = {
        "whole": [None, None, 1, 2, 3.0, None],
        "float": [0.5, 1, 2, 3, None, None],
        "texts": ["5", None, 6, [7], None, {"x": None}],
        "flags": [True, None, None, None, False, None],
        "mixed": [1, 2, 3, 4, 5.5, "a"],
        "lists": [[1], {}, None, [], [{}], {"x": []}],
    }
    file, path = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    file.write_text("".join(json.dumps({"prompt": "p", **row}) + "\n" for row in rows))
    finish(path, [*read_rows(file)])
    assert len([*path.glob("part-*")]) == 3
    table = pandas.read_parquet(path, dtype_backend="pyarrow")
    found = {name: str(table[name].dtype).split("[")[0] for name in columns}
    assert found == dict(
        zip(columns, ("int64", "double", "string", "bool", "string", "string"), strict=True)
    )
    assert list(table["mixed"]) == ["1", "2", "3", "4", "5.5", "a"]
    assert list(table["lists"].dropna()) == ["[1]", "{}", "[]", "[{}]", '{"x": []}']


def test_values_that_parquet_has_not_end_no_job(tmp_path):
    import pyarrow.parquet

    file, path = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    file.write_text(
        '{"prompt": "p", "meta": {}, "big": 36893488147419103232}\n'
        '{"prompt": "\\ud800ä", "\\udfff": ["\\ud800"]}\n'
    )
    finish(path, [*read_rows(file)])
    first, second = pyarrow.parquet.read_table(path).to_pylist()
    assert (first["meta"], first["big"]) == ("{}", "36893488147419103232")
    assert second["prompt"] == "\\ud800ä"
    assert json.loads(second["\\udfff"]) == ["\ud800"]
    assert finish(path, [*read_rows(file)]) == 0


def test_numbers_that_json_has_not_are_null(tmp_path):
    """In lines, and in JSON text in Parquet, which has them as numbers."""
    import pyarrow.parquet

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    file = tmp_path / "in.jsonl"
    file.write_text(
        '{"prompt": "p", "x": NaN, "y": [NaN, {"z": -Infinity}], "big": 1e999}\n'
        '{"prompt": "p", "x": 0.5, "fails": true, "temperature": NaN, "\\ud800": NaN}\n'
    )
    rows, path, parts = [*read_rows(file)], output(tmp_path, "jsonl"), output(tmp_path, "parquet")
    finish(path, rows)
    finish(parts, rows)
    whole, failed = (json.loads(line, parse_constant=refuse) for line in path.open())
    assert (whole["x"], whole["y"], whole["big"]) == (None, [None, {"z": None}], None)
    assert (failed["x"], failed["temperature"], failed["\ud800"]) == (0.5, None, None)
    first, second = pyarrow.parquet.read_table(parts).to_pylist()
    assert math.isnan(first["x"]) and second["x"] == 0.5 and first["big"] == math.inf
    assert json.loads(first["y"], parse_constant=refuse) == [None, {"z": None}]
    with pytest.raises(ValueError, match="`job` must be representable in JSON"):
        ResumableSink(tmp_path / "other.jsonl", {"x": math.nan})


def test_files_before_another_type_are_written_anew_after_a_kill_too(tmp_path, monkeypatch):
    import pyarrow.parquet

    monkeypatch.setattr("nanovllm.batch.parts.PART_ROWS", 1)
    file, path = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    file.write_text("".join(f'{{"prompt": "p", "x": {x}}}\n' for x in ("1", "2", '"a"')))
    rows, replace, count = [*read_rows(file)], os.replace, []

    def killed(*names):
        count.append(names)
        if len(count) == 6:  # a job's description, three parts, and the first of them anew
            raise KeyboardInterrupt
        replace(*names)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        finish(path, rows)
    monkeypatch.undo()
    schemas = [pyarrow.parquet.read_schema(part) for part in sorted(path.iterdir())]
    assert [str(schema.field("x").type) for schema in schemas] == ["string", "int64", "string"]
    assert finish(path, rows) == 0
    assert pyarrow.parquet.read_table(path).column("x").to_pylist() == ["1", "2", "a"]


def test_requests_of_openais_format_go_to_parquet(tmp_path):
    """With other rows among them."""
    import pyarrow.parquet

    body = {"messages": [{"role": "user", "content": "hi"}]}
    ask = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    file, path = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    file.write_text("".join(json.dumps({"custom_id": i, **ask}) + "\n" for i in ("a", "b", "c")))
    rows = [*read_rows(file), *as_rows(["plain"])]
    assert finish(path, rows, 2) == 4
    with ResumableSink(path) as sink:
        _, _, *left = rows
        assert [*sink.unfinished(rows)] == left
        sink.write(answer(left[0], "too long"))
        sink.write(answer(left[1]))
    assert finish(path, rows) == 0
    table = pyarrow.parquet.read_table(path)
    assert table.column("error").to_pylist() == [None, None, "too long", None]
    assert table.column("custom_id").to_pylist() == ["a", "b", "c", None]
    codes = [each and json.loads(each)["status_code"] for each in table["response"].to_pylist()]
    assert codes == [200, 200, 400, None]
    with ResumableSink(path, retry_errors=True) as sink:
        assert [*sink.unfinished(rows)] == [rows[2]]


def test_parts_are_written_when_they_are_due(tmp_path, monkeypatch):
    rows, path = rows_of(tmp_path, 4), output(tmp_path, "parquet")
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with ResumableSink(path) as sink:
        for row in rows[:3]:
            sink.write(answer(row))
        assert numbers(path) == []
        sink.tick()
        assert numbers(path) == []
        now[0] = 61.0
        sink.tick()
        assert numbers(path) == [0, 1, 2]
        now[0] = 130.0
        sink.write(answer(rows[3]))
        assert numbers(path) == [0, 1, 2]  # it has just come
    assert numbers(path) == [0, 1, 2, 3]


def test_lines_are_synced_when_that_is_due(tmp_path, monkeypatch):
    rows, path = rows_of(tmp_path, 4), output(tmp_path, "jsonl")
    now, synced = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with ResumableSink(path) as sink:
        monkeypatch.setattr(os, "fsync", synced.append)
        sink.write(answer(rows[0]))
        sink.write(answer(rows[1]))
        assert not synced and numbers(path) == [0, 1]  # there for others, whoever is killed
        sink.tick()
        assert synced == []
        now[0] = 11.0
        sink.tick()
        assert len(synced) == 1
        now[0] = 22.0
        sink.tick()
        assert len(synced) == 1  # nothing has come
        sink.write(answer(rows[2]))
        sink.write(answer(rows[3]))
        assert len(synced) == 1
    assert len(synced) == 2


def test_half_characters_are_written_as_escapes(tmp_path):
    file, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "\\ud800", "ä": 1}\n')
    finish(path, [*read_rows(file)])
    assert json.loads(path.read_bytes())["prompt"] == "\ud800"
    assert finish(path, [*read_rows(file)]) == 0


def test_without_pyarrow_parquet_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match='pip install "pyarrow>=14"'):
        ResumableSink(tmp_path / "out.parquet")
    assert [*tmp_path.iterdir()] == []


def test_a_stream_has_lines_at_once(tmp_path):
    rows = rows_of(tmp_path, 2)
    read, write = os.pipe()
    with open(write, "wb") as file, StreamSink(file) as sink:
        sink.write(answer(rows[0]))
        assert json.loads(os.read(read, 10_000))["_row"] == 0
        os.close(read)
        with pytest.raises(BrokenPipeError):
            sink.write(answer(rows[1]))
        assert sink.num_finished == 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # or closing it fails, too


def test_a_stream_has_texts_on_one_line_each():
    first, second = as_rows(["a", "b"])
    file = io.BytesIO()
    with StreamSink(file, "text") as sink:
        sink.write(answer(first))
        sink.write(answer(second, "bad"))
    assert file.getvalue().decode() == "a0\\n\\\\ü\n\n"
    assert (sink.num_finished, sink.num_errors) == (2, 1)


def test_a_directory_is_not_closed_twice(tmp_path):
    parts = Parts(tmp_path / "out.parquet")
    parts.close()
    assert numbers(tmp_path / "out.parquet") == []
