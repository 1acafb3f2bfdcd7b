"""Ray Data, Spark and Daft on this machine: `pip install ".[ray]" daft pyspark`, and then
`pytest -m slow -n 0 tests/batch/test_dataframes.py`, as .ci/run does.
"""

import itertools
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.batch import RayGenerate

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"num_kvcache_blocks": 16, "max_num_seqs": 8}
GREEDY = {"temperature": 0, "max_tokens": 8}
NUM_ROWS = 400


class Mortal(RayGenerate):
    """Leaves a file with the name of its process. The first whose engine begins its 20th step is
    lost there, with rows on their way, as the file `fate` says.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        super().__init__(nanovllm.TINY, **options)
        Path(directory, str(os.getpid())).touch()
        fate, own = Path(directory, "fate"), Path(directory, f"fate of {os.getpid()}")
        steps, step = itertools.count(), LLM.step

        def mortal(llm: LLM) -> Any:
            if next(steps) == 20:
                with suppress(FileNotFoundError):  # another was first
                    fate.rename(own)
                    if own.read_text() == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("a GPU is lost")
            return step(llm)

        LLM.step = mortal  # type: ignore[method-assign]


@pytest.fixture(name="ray", scope="module")
def ray_fixture() -> Iterator[Any]:
    """Ray with two CPUs."""
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install ".[ray]"')
    pytest.importorskip("ray.data", reason='Ray Data is not installed: pip install ".[ray]"')
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2,
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find it
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_rows_of_a_worker_that_dies_are_computed_again(ray: Any, how: str, tmp_path: Path) -> None:
    """Every row once, and as an engine alone answers it."""
    (tmp_path / "fate").write_text(how)
    prompts = [f"{i}+{i % 7}=" for i in range(NUM_ROWS)]
    rows = ray.data.from_items([{"id": i, "prompt": prompt} for i, prompt in enumerate(prompts)])
    options = {"sampling_params": GREEDY, "id_column": "id", **OPTIONS}
    answers = rows.repartition(target_num_rows_per_block=16).map_batches(
        Mortal,
        fn_constructor_kwargs={"directory": str(tmp_path), **options},
        batch_format="pyarrow",
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=2),
        num_cpus=0.5,  # one is left for the tasks that read
    )
    found = [*answers.iter_rows()]
    with LLM(nanovllm.TINY, **OPTIONS) as llm:
        expected = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    assert sorted(row["id"] for row in found) == list(range(NUM_ROWS))
    texts = {row["id"]: (row["generated_text"], row["error"]) for row in found}
    assert [texts[i] for i in range(NUM_ROWS)] == [(output["text"], None) for output in expected]
    [died] = tmp_path.glob("fate of *")
    processes = {path.name for path in tmp_path.iterdir()} - {died.name}
    assert died.name.removeprefix("fate of ") in processes
    assert len(processes) == 3, "a worker in the place of the one that died"


def test_the_example_goes_on(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def java_version() -> int:
    """The major version of the Java that Spark finds, 0 where it finds none."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else None)
    if java is None:
        return 0
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    found = re.search(r'version "(\d+)', said)
    assert found, said
    return int(found[1])


@pytest.mark.parametrize("library", ["ray", "pyspark", "daft"])
def test_blocks_of_the_documentation(
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny: str,
    request: pytest.FixtureRequest,
) -> None:
    """On a CPU, with the embedded checkpoint and few rows."""
    pytest.importorskip(library, reason=f"{library} is not installed")
    if library == "ray":
        request.getfixturevalue("ray")
    if library == "pyspark" and java_version() < 17:
        pytest.skip(f"Spark 4 needs Java 17, found {java_version() or 'none'}")
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
