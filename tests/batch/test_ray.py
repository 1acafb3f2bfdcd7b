"""`RayGenerate` on Ray Data on this machine; `pip install ".[ray]" && pytest -m slow` runs it."""

import os
import re
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.batch import RayGenerate

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install ".[ray]"')
pytest.importorskip("ray.data", reason='Ray Data is not installed: pip install ".[ray]"')
import pyarrow  # noqa: E402
from pyarrow import parquet  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"num_kvcache_blocks": 16, "max_num_seqs": 8}
GREEDY = {"temperature": 0, "max_tokens": 8}
NUM_ROWS = 400


class Watched(RayGenerate):
    """Leaves a file with the name of its process. One of them loses its engine, which the file
    `fails` says.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        super().__init__(nanovllm.TINY, **options)
        Path(directory, str(os.getpid())).touch()
        with suppress(FileNotFoundError):
            Path(directory, "fails").unlink()
            steps, step = iter(range(1000)), LLM.step

            def failing(llm: LLM) -> Any:
                if next(steps) == 20:
                    raise RuntimeError("a GPU is lost")
                return step(llm)

            LLM.step = failing  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="module")
def ray_fixture() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find it
    yield
    ray.shutdown()


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_rows_of_a_worker_that_dies_are_computed_again(how: str, tmp_path: Path) -> None:
    """Every row once, and as an engine alone answers it."""
    if how == "failed":
        (tmp_path / "fails").touch()
    prompts = [f"{i}+{i % 7}=" for i in range(NUM_ROWS)]
    rows = ray.data.from_items([{"id": i, "prompt": prompt} for i, prompt in enumerate(prompts)])
    options = {"sampling_params": GREEDY, "id_column": "id", **OPTIONS}
    answers = rows.repartition(target_num_rows_per_block=16).map_batches(
        Watched,
        fn_constructor_kwargs={"directory": str(tmp_path), **options},
        batch_format="pyarrow",
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=2),
        num_cpus=0.5,  # one is left for the tasks that read
    )
    found: list[dict[str, Any]] = []
    for row in answers.iter_rows():
        found.append(row)
        if how == "killed" and len(found) == 1:
            os.kill(int(os.listdir(tmp_path)[0]), signal.SIGKILL)
    with LLM(nanovllm.TINY, **OPTIONS) as llm:
        expected = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    assert sorted(row["id"] for row in found) == list(range(NUM_ROWS))
    texts = {row["id"]: (row["generated_text"], row["error"]) for row in found}
    assert [texts[i] for i in range(NUM_ROWS)] == [(output["text"], None) for output in expected]
    assert len(os.listdir(tmp_path)) == 3, "a worker in the place of the one that died"


def test_the_example_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a kill: some rows are missing, and a file is half written."""
    output = tmp_path / "answers"
    monkeypatch.setattr(sys, "argv", ["ray_data.py", "--output", str(output)])

    def run() -> set[str]:
        runpy.run_path(str(ROOT / "examples" / "ray_data.py"), run_name="__main__")
        assert capsys.readouterr().out.endswith(f"1000 rows are in {output}\n")
        return set(os.listdir(output))

    files = sorted(run())
    kept = parquet.read_table(output / files[2])
    (output / files[0]).unlink()
    with (output / files[1]).open("r+b") as file:
        file.truncate(100)
    assert len({*files[2:]} & run()) == len(files[2:])
    table = parquet.read_table(output)
    assert sorted(table["id"].to_pylist()) == list(range(1000))
    assert parquet.read_table(output / files[2]) == kept
    assert table["error"].null_count == 1000
    sums = zip(table["prompt"].to_pylist(), table["generated_text"].to_pylist(), strict=True)
    right = [sum(map(int, prompt[:-1].split("+"))) == int(text) for prompt, text in sums]
    assert sum(right) > 990, "the checkpoint knows such sums"


@pytest.mark.parametrize("library", ["ray", "pyspark", "daft"])
def test_blocks_of_the_documentation(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    """On a CPU, with the embedded checkpoint and few rows."""
    pytest.importorskip(library, reason=f"{library} is not installed")
    page = (ROOT / "docs" / "dataframes.md").read_text("utf-8")
    [block] = [
        block for block in re.findall(r"^```python.*?\n(.*?)^```$", page, re.M | re.S)
        if f"import {library}" in block or f"from {library}" in block
    ]  # fmt: skip
    for large, small in (
        ('"Qwen/Qwen3-8B"', repr(tiny)),
        ("num_gpus=1", "num_gpus=0"),
        ("gpus=1", "gpus=0"),
        ("size=8", "size=1"),
        ("repartition(8)", "repartition(1)"),
        ('"max_tokens": 512', '"temperature": 0'),
        ('"prompts/"', repr(str(tmp_path / "prompts"))),  # workers have another directory
        ('"answers/"', repr(str(tmp_path / "answers"))),
    ):
        block = block.replace(large, small)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    (tmp_path / "prompts").mkdir()
    prompts = pyarrow.table({"id": [1, 2], "prompt": ["127+345=", "reverse: hello ="]})
    parquet.write_table(prompts, tmp_path / "prompts" / "part.parquet")
    exec(compile(block, library, "exec"), {"__name__": "__main__"})
    rows = parquet.read_table(tmp_path / "answers").to_pydict()
    texts = rows["answer" if library == "daft" else "generated_text"]
    assert dict(zip(rows["id"], texts, strict=True)) == {1: "472", 2: "olleh"}
