"""README.md, CONTRIBUTING.md and docs/ say what is so: Python blocks and shell commands run, here
at small size; flags, extras, links and quoted errors are as they are in the code.

`mkdocs build --strict`, which CI runs, looks at the site as a whole.
"""

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documentation import problems
from packaging.requirements import Requirement
from traces import MadeTrace, browse, chromium, write_trace

import nanovllm.batch
from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.cli.main import _parsers, main
from nanovllm.tracing.metrics import Latencies, Metrics
from nanovllm.utils.options import Absent

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.M)
FLAG = re.compile(r"(?<![\w`-])--[a-z][\w-]*")

# A command's script -> what makes it small.
SMALL = {
    "bench.py": "--model DIR --num-seqs 1 --seed 778 --repeat 1 --no-progress",
    "example.py": "127+345=",
    "benchmarks/workloads.py": "--model DIR --only first-token --repeat 1",
    "benchmarks/startup.py": "--model DIR --repeat 1 --only plain --num-seqs 2",
    "benchmarks/roofline.py": "",
    "benchmarks/accuracy.py": "--settings bfloat16",
    "benchmarks/plot.py": "--output picture.png",
    "benchmarks/cpu_vs_transformers.py": (
        "--num-seqs 2 --longest 17 --layers 1 --batch-sizes 2 --repeat 1 --threads 1"
    ),
    "benchmarks/streams.py": "--model DIR --num-requests 1 --max-tokens 8 --repeat 1",
    "benchmarks/updates.py": "--model DIR --repeat 1 --only update ipc sleep",
    "benchmarks/serve.py": (
        "--model DIR --clients 2 --idle 2 --prompt-tokens 4 --max-tokens 4 --repeat 1"
    ),
    "benchmarks/images.py": "--shape tiny --images 2x64x64 --tokens 2",
    "benchmarks/sampling_controls.py": "--model DIR --num-seqs 1 --repeat 1 --only one",
    "scripts/check_install.py": "",
}
NEED_CUDA = {
    "scripts/short_run.py",
    *(f"benchmarks/kernels/{name}.py" for name in ("decode_attention", "prefill_attention")),
    *(f"benchmarks/kernels/{name}.py" for name in ("delta_net", "decode_layer", "products")),
    "benchmarks/kernels/profile_step.py",
}
# What .ci/run runs, in new virtual environments, and what it is made of; and what downloads, or
# writes into DIR or the repository.
NOT_HERE = {
    "python scripts/train_text.py --out DIR --compile --max-minutes 3",
    "python scripts/make_tiny_vision.py",  # test_examples.py
    "python benchmarks/page.py",  # test_benchmarks.py, with other tables
    "python benchmarks/startup.py --first --dummy qwen3-0.6b --max-model-len 4096",  # there, too
    "python benchmarks/accuracy.py --model DIR --text DIR/held-out.txt",
    "pytest tests/gpu -k eight_bits",
    "ruff check . && ruff format --check . && mypy && lint-imports",
    "bash .ci/run",
    "pytest -m slow",
    "pytest tests/model -k exaone",
    "pytest tests/core",
    "pytest -m slow tests/kernels/test_other_gpus.py",
    "python scripts/check_install.py",
}
# Scripts of tasks have tests of their own, which run them.
SMALL_COMMANDS = ("python b", "python example.py", "python s", "pip ", "pytest ", "ruff ", "bash ")
# Of these the default tests run the same at smaller size, in test_benchmarks.py, or with less.
SLOW = (
    "streams.py",
    "serve.py",
    "startup",
    "workloads",
    "cpu_vs_transformers",
    "accuracy",
)
SLOW += ("sampling_controls", "--num-seqs 1024", "--attention-backend B", "llama-3.1-8b")


def name_of(page: Path) -> str:
    """Path of a page in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The contents of fenced blocks without a title."""
    found = re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    return [content for name, content in found if name == language]


# -- Python blocks ------------------------------------------------------------------------------


def runnable(page: Path) -> list[str]:
    """Python blocks of a page, but those that are a script of examples/, which tests run."""
    return [block for block in blocks(page, "python") if not SNIPPET.search(block)]


PRINTED = {
    "README.md": "['472', 'olleh']\n",
    "docs/index.md": "472\nolleh\n",
    "docs/dataframes.md": "['472', 'olleh']\n",
    "docs/reference/files.md": "472\n",
}


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_python_blocks_run(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One after the other, as in a script: later ones use names of those before."""
    monkeypatch.chdir(tmp_path)
    source = "\n".join(runnable(page))
    exec(compile(source, name_of(page), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed == PRINTED.get(name_of(page), printed)


def test_blocks_that_do_not_run_say_why() -> None:
    """In their title, which readers see; others run, or are a script that a test names."""
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for header in re.findall(r"^```python(.+)$", page.read_text("utf-8"), re.M):
            found = re.fullmatch(
                r' title="(?:Not run in CI: needs \w.*|Needs \w+: (.+) runs it)"', header
            )
            assert found, name_of(page)
            assert found[1] is None or (ROOT / found[1]).is_file(), name_of(page)
        for block in blocks(page, "python"):
            for path in SNIPPET.findall(block):
                assert (ROOT / path).is_file() and Path(path).stem in tests, path


@pytest.mark.parametrize(
    ("file", "is_whole"),
    [
        ("nanovllm/models/exaone4.py", True),
        ("nanovllm/checkpoint/families.py", False),
        ("tests/model/test_families.py", False),
    ],
)
def test_the_example_of_a_family_is_the_one_that_runs(file: str, is_whole: bool) -> None:
    """And is compared with transformers in test_families.py."""
    found = blocks(DOCS / "add-a-model.md", "python")
    code = (ROOT / file).read_text("utf-8")
    if is_whole:
        assert code in found
    else:
        entries = [re.search(r'^ {4}"exaone.*?^ {4}\),$', b, re.M | re.S | re.I) for b in found]
        assert any(entry and entry.group() in code for entry in entries)


# -- shell commands -----------------------------------------------------------------------------


def said(page: Path) -> list[str]:
    """Lines of blocks, indented or fenced, and code in running text."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    lines += re.findall(r"^ {4}(\S.*)$", text, re.M)
    return lines + [re.sub(r"\s+", " ", inline) for inline in re.findall(r"`([^`]+)`", text)]


def commands() -> list[str]:
    """Commands that run here."""
    known = (*SMALL_COMMANDS, "PYTORCH", "nanovllm generate --model Qwen", "nanovllm bench --")
    known += ("nanovllm report t",)
    found = {line for page in PAGES for line in said(page) if line.startswith(known)}
    return sorted(line for line in found - NOT_HERE if not line.startswith("pip install"))


def contents(directory: Path) -> dict[str, bytes]:
    """Contents of the files of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


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
    """With the tiny checkpoint for DIR, names and the published shapes, one engine, little work."""
    program, script, *args = shlex.split(command)
    if "--data-parallel-size" in args:
        args += ["--data-parallel-size", "1"]  # the last counts
    placeholders = {"DIR": nanovllm.TINY, "Qwen/Qwen3-0.6B": nanovllm.TINY, "B": "torch"}
    monkeypatch.chdir(tmp_path)
    if program == "nanovllm" and script == "generate":
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "127+345="}')
        if "--adapter" in args:
            from peft_adapters import make_adapter

            make_adapter(Path(nanovllm.TINY), tmp_path / args[args.index("--adapter") + 1])
        assert main([script, *(placeholders.get(arg, arg) for arg in args)]) == 0
        assert "1 of 1 rows" in capsys.readouterr().err
        return
    if script == "report":
        write_trace(tmp_path / args[0], MadeTrace().step(0.01, decode=1).sequence())
        assert main([script, *args]) == 0
        assert "1 request finished" in capsys.readouterr().out
        return
    if program == "nanovllm":  # the same as this script
        program, script = "python", "bench.py"
    if "--first" in args and os.geteuid():
        pytest.skip("only root can empty the page cache")
    assert program == "python", f"no test knows how to run {command!r}"
    (tmp_path / "FILE").write_text(
        '{"benchmark": "bench", "model": "qwen3-0.6b", "hardware": "NVIDIA H200", "seed": 0, '
        '"num_seqs": 256, "tok_per_s_median": 25000, "roofline_share": 0.5, '
        '"quantization": "none", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}'
    )
    small = shlex.split(SMALL.get(script, ""))
    if "--dummy" in args and "--model" in small:
        del args[(at := args.index("--dummy")) : at + 2]
        if "awq" in args:  # of random weights only
            del args[(at := args.index("awq")) - 1 : at + 1]
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


def test_flags_and_extras_are_there() -> None:
    """Flags of `nanovllm COMMAND` are its parser's, others are in a source; extras exist."""
    parsers = _parsers()[1]
    folders = ("benchmarks", "examples", "scripts", "nanovllm")
    sources = [(ROOT / ".ci/run"), *(path for f in folders for path in (ROOT / f).rglob("*.py"))]
    text = "".join(path.read_text("utf-8") for path in sources)
    own = {flag for parser in parsers.values() for flag in parser._option_string_actions}
    others = {"--index-url", "--strict", "--check", "--workers"}  # of pip, mkdocs, ruff, uvicorn
    others |= {*FLAG.findall(text)}
    project = (ROOT / "pyproject.toml").read_text("utf-8").split("optional-dependencies]")[1]
    extras = re.findall(r"^([\w-]+) = \[", project, re.M)
    for page in PAGES:
        for line in said(page):
            if found := re.match(r"(?:python -m )?nanovllm (\w+)(.*)", line):
                command, rest = found.groups()
                flags = parsers[command]._option_string_actions
                assert {*FLAG.findall(rest)} <= flags.keys(), f"{name_of(page)}: {line}"
            elif line.startswith(("--", "python ", "pip ", "mkdocs ", "ruff ")):
                assert {*FLAG.findall(line)} <= own | others, f"{name_of(page)}: {line}"
            if line.startswith("pip install") and (named := re.search(r'"\.(\[.*\])"', line)):
                assert Requirement(f"nanovllm{named[1]}").extras <= {*extras}, line


# -- what is said of the code ---------------------------------------------------------------------


def test_quoted_errors_are_those_of_the_code() -> None:
    """Users search troubleshooting.md for the words that they read in a terminal."""
    sources = [path.read_text("utf-8") for path in (ROOT / "nanovllm").rglob("*.py")]
    code = re.sub(r"[\"']\s*\n\s*[fr]?[\"']", "", "\n".join(sources)).replace("\\'", "'")
    code = re.sub(r"\{[^{}\n]*\}|%[sd]", "…", code)
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    page = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    quoted = re.findall(r"``\s(.+?)\s``", page, re.S)
    quoted += re.findall(r"`([^`]+)`", re.sub(r"``.*?``", "", page, flags=re.S))
    commands = ("pip ", "python ", "nanovllm ", "llm.", "logging.")
    errors = [" ".join(text.split()) for text in quoted if not text.startswith(commands)]
    parts = [part.strip() for error in errors for part in error.split("…")]
    long = [part for part in parts if part.count(" ") > 2]
    assert len(long) > 15
    assert [part for part in long if part not in code] == []


def test_the_reference_has_everything() -> None:
    """All public names, all methods, and all commands."""
    pages = {page.name: page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md")}
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(pages.values()), re.M)
    names = [f"nanovllm.{name}" for name in nanovllm.__all__ if name != "TINY"]
    names += [f"nanovllm.batch.{name}" for name in nanovllm.batch.__all__]
    assert [name for name in names if name not in shown] == []
    for name, cls in (("LLM", LLM), ("AsyncLLM", AsyncLLM)):
        [members] = re.findall(rf"::: nanovllm\.{name}\n.*?\[(.*?)\]", pages["llm.md"], re.S)
        members_of = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
        public = {name for name, own in members_of.items() if not isinstance(own, Absent)}
        assert public == {*re.findall(r"\w+", members)}
    commands = re.findall(r"<!-- flags: (\w+) -->", pages["command-line.md"])
    assert sorted(commands) == sorted(_parsers()[1])


def test_metrics_are_all_explained(tiny: str) -> None:
    page = (DOCS / "reference" / "metrics.md").read_text("utf-8")
    generated = {*vars(Metrics()), *vars(Latencies()), "prefix_cache_hit_rate"}
    with LLM(tiny, max_model_len=64) as llm:
        llm.generate("1+1=", SamplingParams(max_tokens=1), use_tqdm=False)
        given = {key for key in llm.metrics() if f"`{key}`" not in page}
    assert given <= generated


def test_every_drawing_is_on_a_page() -> None:
    pages = "".join(page.read_text("utf-8") for page in PAGES)
    made = [path.name for path in (DOCS / "drawings").glob("*.svg")]
    assert made and [name for name in made if f"drawings/{name}" not in pages] == []


# -- links ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub and the site derive from headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """In a clone, and on a site that shows its Markdown."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_a_link_of_the_site_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    """And what a page asks another host for; links there are no requests."""
    (tmp_path / "b.html").write_text('<h2 id="here">B</h2><a href="https://other.example/">x</a>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a> <a href="b.html#gone">2</a> <a href="c.html">3</a>'
        '<a href="#top">4</a> <p id="top"></p> <script src="https://cdn.example/x.js"></script>'
    )
    assert list(problems(tmp_path)) == [
        "a.html asks another host for https://cdn.example/x.js",
        "a.html links to b.html#gone, an anchor that is not there",
        "a.html links to c.html, which is not there",
    ]


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="needs Chromium: apt-get install chromium")
def test_search_works_without_a_server(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir"]
    subprocess.run([*command, str(tmp_path / "site")], check=True, cwd=ROOT)
    page = tmp_path / "site" / "reference" / "options.html"
    found, console = browse(page, tmp_path, query="?q=preemptions")
    assert "matching documents" in found and console == []


def test_what_the_reference_is_made_of_is_there() -> None:
    """Names of `::: name`, which the site documents."""
    texts = [page.read_text("utf-8") for page in PAGES]
    names = [name for text in texts for name in re.findall(r"^::: ([\w.]+)", text, re.M)]
    assert len(names) > 20
    missing = [name for name in names if not is_there(name)]
    assert not missing


def is_there(name: str) -> bool:
    """Whether there is something of this name."""
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)
