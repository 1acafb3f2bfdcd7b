"""README.md and docs/ hold what runs: Python blocks, and shell commands, here at small size."""

import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

import nanovllm
from nanovllm.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# A command's script -> what makes it small.
SMALL = {
    "bench.py": "--model DIR --num-seqs 1 --seed 553 --no-progress",
    "example.py": "127+345=",
    "benchmarks/workloads.py": "--model DIR --only bs1 --repeat 1",
    "benchmarks/startup.py": "--model DIR --repeat 1",
    "benchmarks/roofline.py": "",
    "benchmarks/accuracy.py": "--settings bfloat16",
    "benchmarks/plot.py": "--output picture.png",
    "benchmarks/cpu_vs_transformers.py": (
        "--num-seqs 2 --longest 17 --layers 1 --batch-sizes 2 --repeat 1 --threads 1"
    ),
    "benchmarks/job_overhead.py": "--model DIR --num-seqs 1 --repeat 1",
    "benchmarks/sampling_controls.py": "--model DIR --num-seqs 2 --repeat 1 --only one",
    "scripts/check_install.py": "",
}
NEED_CUDA = {
    *("benchmarks/decode_attention.py", "benchmarks/prefill_attention.py"),
    *("benchmarks/profile_step.py", "scripts/short_run.py"),
}
# What .ci/run runs, in new virtual environments, and what it is made of; and what downloads, or
# writes into DIR.
NOT_HERE = {
    "python scripts/train_text.py --out DIR --compile --max-minutes 3",
    "python benchmarks/accuracy.py --model DIR --text DIR/held-out.txt",
    "pytest tests/gpu -k eight_bits",
    "pip install . && python example.py",
    'pip install -e ".[test]" && pytest',
    "ruff check . && ruff format --check . && mypy && lint-imports",
    "bash .ci/run",
    "pytest -m slow",
    "pytest tests/model -k exaone",
    "pytest tests/core",
    "pytest -m slow tests/kernels/test_other_gpus.py",
    'pip install -e ".[bench]"',
    'pip install ".[structured-outputs]"',
    'pip install ".[parquet]"',
    'pip install ".[ray]"',
    "python examples/ray_data.py",  # tests/batch/test_ray.py
    "pip install torch --index-url https://download.pytorch.org/whl/cpu",
    "python scripts/check_install.py",
}


def blocks(page: Path, language: str) -> list[str]:
    """The contents of fenced blocks."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def test_the_example_of_a_family_is_the_one_that_runs() -> None:
    """And is compared with transformers in test_families.py."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    [model] = blocks(ROOT / "CONTRIBUTING.md", "python")
    assert model == (ROOT / "nanovllm/models/exaone4.py").read_text("utf-8")
    for file, begin in (
        ("nanovllm/families.py", '"Exaone4ForCausalLM"'),
        ("tests/model/test_families.py", '"exaone 4"'),
    ):
        lines = re.search(rf"^ {{8}}{begin}.*?^ {{8}}\),$", page, re.M | re.S)
        assert lines, file
        shown = re.sub(r"^ {4}", "", lines.group(), flags=re.M)
        assert shown in (ROOT / file).read_text("utf-8"), file


def commands() -> list[str]:
    """Commands in blocks, indented or fenced, and in running text."""
    found: set[str] = set()
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
        lines = [line for block in blocks(page, "") for line in block.splitlines()]
        lines += re.findall(r"^ {4}(\S.*)$", text, re.M)
        lines += [re.sub(r"\s+", " ", inline) for inline in re.findall(r"`([^`]+)`", text)]
        known = (
            "python b",
            "python e",
            "python s",
            "pip ",
            "hf ",
            "pytest ",
            "ruff ",
            "bash ",
            "PYTORCH",
            "nanovllm generate --",
        )
        found |= {line for line in lines if line.startswith(known)}
    return sorted(found - NOT_HERE)


def contents(directory: Path) -> dict[str, bytes]:
    """Of the files of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One after the other, as in a script: later ones use names of those before."""
    monkeypatch.chdir(tmp_path)
    found = blocks(page, "python")
    if page.name == "dataframes.md":  # the others need clusters: tests/batch/test_ray.py
        found = [block for block in found if "import pandas\n" in block]
    source = "\n".join(found)
    names = {"__name__": "__main__"}
    exec(compile(source, page.name, "exec"), names)
    if page.name == "README.md":
        printed = capsys.readouterr().out
        assert printed.startswith("['472', 'olleh']\n") and printed.endswith("\n472\n")
    if page.name == "dataframes.md":
        assert capsys.readouterr().out == "['472', 'olleh']\n"


# Of these the default tests run the same at smaller size: test_benchmarks.py.
SLOW = ("job_overhead", "startup", "workloads", "cpu_vs_transformers")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] * any(name in command for name in SLOW))
        for command in commands()
    ],
)
def test_shell_commands_run(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """With the tiny checkpoint for DIR, names and the published shapes, and little work."""
    program, script, *args = shlex.split(command)
    placeholders = {"DIR": nanovllm.TINY, "Qwen/Qwen3-0.6B": nanovllm.TINY, "B": "torch"}
    monkeypatch.chdir(tmp_path)
    if program == "nanovllm":
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "127+345="}')
        assert main([script, *(placeholders.get(arg, arg) for arg in args)]) == 0
        assert "1 of 1 rows" in capsys.readouterr().err
        return
    if "--first" in args and os.geteuid():
        pytest.skip("only root can empty the page cache")
    assert program == "python", f"no test knows how to run {command!r}"
    (tmp_path / "FILE").write_text(
        '{"benchmark": "bench", "model": "qwen3-0.6b", "hardware": "NVIDIA H200", "seed": 0, '
        '"num_seqs": 256, "tok_per_s_median": 25000, "roofline_share": 0.5}'
    )
    small = shlex.split(SMALL.get(script, ""))
    if "--dummy" in args and "--model" in small:
        del args[(at := args.index("--dummy")) : at + 2]
    args = [placeholders.get(arg, arg) for arg in [*args, *small]]
    monkeypatch.setattr(sys, "path", [str(ROOT / Path(script).parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [script, *args])
    if script in NEED_CUDA and not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert "needs a CUDA device" in capsys.readouterr().err
        return
    assert script in SMALL or script in NEED_CUDA, f"{script} has no small size here"
    before = contents(Path(nanovllm.TINY))
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert capsys.readouterr().out
    assert contents(Path(nanovllm.TINY)) == before, "a benchmark has changed the user's checkpoint"
