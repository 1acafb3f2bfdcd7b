"""The output of a job that is killed, and comes back. No engine here: results are made up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import CompletionOutput, RequestOutput
from nanovllm.batch import Result, ResumableSink, read_rows
from nanovllm.batch.parts import Parts
from nanovllm.batch.sink import StreamSink

FORMATS = ("jsonl", "parquet", "text")
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
    """Which rows the output has, by its own words."""
    if path.suffix == ".jsonl":
        return [json.loads(line)["_row"] for line in path.read_text("utf-8").splitlines()]
    if path.suffix == ".txt":
        return [int(line[1:].split("\\n")[0]) for line in path.read_text("utf-8").splitlines()]
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).column("_row").to_pylist() if [*path.iterdir()] else []


def output(directory, kind):
    return directory / {"jsonl": "out.jsonl", "parquet": "out.parquet", "text": "out.txt"}[kind]


@SEVERAL
@given(st.data())
def test_cut_at_any_byte_the_output_is_completed(tmp_path_factory, data):
    """What a kill, a full disk or a power cut leaves: the beginning of what was written, perhaps
    with zeros behind it.
    """
    directory = tmp_path_factory.mktemp("cut")
    kind = data.draw(st.sampled_from(["jsonl", "text"]))
    rows, path = rows_of(directory, 6), output(directory, kind)
    finish(path, rows)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    zeros = data.draw(st.sampled_from([0, 1, 100])) if kind == "jsonl" else 0
    path.write_bytes(whole[:cut] + bytes(zeros))
    kept = whole[:cut].count(b"\n")
    assert finish(path, rows) == 6 - kept
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
    (path / ".part.tmp").write_bytes(b"PAR1")
    assert finish(path, rows) == 2
    assert numbers(path) == [*range(6)]
    begun = output(tmp_path, "parquet").with_name("begun.parquet")
    begun.mkdir()
    (begun / ".part.tmp").write_bytes(b"PAR1")
    ResumableSink(begun, {"n": 1}).close()
    ResumableSink(begun, {"n": 2}).close()  # there is no result of the other yet
    assert sorted(file.name for file in path.iterdir()) == [
        "part-000000.parquet",
        "part-000001.parquet",
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
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
    with pytest.raises(ValueError, match="`retry_errors`"):
        ResumableSink(tmp_path / "out.txt", retry_errors=True)


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
    with pytest.raises(ValueError, match="is no output of such a job"):
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


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_disk_that_is_full_leaves_whole_results(tmp_path, kind):
    """A limit of the size of files stands for it: the call that reaches it writes a part, too."""
    rows_of(tmp_path, 60)
    path = output(tmp_path, kind)
    command = [sys.executable, "-c", FULL, str(tmp_path / "in.jsonl"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written, errno = map(int, done.stdout.split())
    assert 0 < written < 60 and errno
    data = path.read_bytes()
    assert data.endswith(b"\n") and data.count(b"\n") == written


def test_a_failed_write_is_not_in_the_way_of_the_next(tmp_path, monkeypatch):
    """The disk has room again: the same sink goes on behind the last whole line."""
    rows, path = rows_of(tmp_path, 3), output(tmp_path, "jsonl")
    write, parts = os.write, []

    def fails_in_the_middle(fd, data):
        if len(parts) == 1:
            raise OSError(28, "No space left on device")
        parts.append(write(fd, data[:20]))
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


def test_parts_hold_values_of_any_types(tmp_path, monkeypatch):
    """Columns that come later, are of another type later, or of mixed types in one part."""
    import pyarrow.parquet

    monkeypatch.setattr("nanovllm.batch.parts.PART_ROWS", 2)
    values = [1, 2, "three", None, 5.5, [6], None, {"x": 7}]
    file, path = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    file.write_text("".join(json.dumps({"prompt": "p", "mine": v}) + "\n" for v in values))
    finish(path, [*read_rows(file)])
    assert len([*path.glob("part-*")]) == 4
    tables = [pyarrow.parquet.ParquetFile(part).read() for part in sorted(path.iterdir())]
    found = [value for table in tables for value in table.column("mine").to_pylist()]
    assert found == [1, 2, "three", None, "5.5", "[6]", None, {"x": 7}]
    assert all(str(table.schema.field("error").type) == "string" for table in tables)


def test_parts_are_written_when_they_are_due(tmp_path, monkeypatch):
    rows, path = rows_of(tmp_path, 4), output(tmp_path, "parquet")
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with ResumableSink(path) as sink:
        for row in rows[:3]:
            sink.write(answer(row))
        assert numbers(path) == []
        now[0] = 61.0
        sink.write(answer(rows[3]))
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
        now[0] = 11.0
        sink.write(answer(rows[2]))
        assert len(synced) == 1
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
    with pytest.raises(ValueError, match=r'pip install "nanovllm\[parquet\]"'):
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


def test_a_directory_is_not_closed_twice(tmp_path):
    parts = Parts(tmp_path / "out.parquet")
    parts.close()
    assert numbers(tmp_path / "out.parquet") == []
