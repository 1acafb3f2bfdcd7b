"""Measure how far a reader has to go: the way of a call, and lines.

    python scripts/structure.py

prints a line of JSON. Frames are those of this package between `LLM.generate` and
`Attention.forward`; functions and files are those that one `generate` of one prompt runs, on a CPU
with the embedded checkpoint. The core path is what docs/architecture.md lists under "Reading
order". Needs import-linter, of the extra `test`.
"""

import argparse
import json
import re
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"\| `([\w/]+\.py)` \| (\d+) \|")  # of the core path's table there


def num_lines(paths: list[Path]) -> int:
    """Number of lines of all files together."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def core_path() -> dict[str, int]:
    """The files of the core path, and the lines that the documentation gives each."""
    return {name: int(lines) for name, lines in ROW.findall(reading_order())}


def reading_order() -> str:
    """The section "Reading order" of the documentation."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    return text.split("## Reading order", 1)[1].split("\n## ", 1)[0]


def run_generate() -> dict[str, int]:
    """Frames, functions and files of one `generate`."""
    from nanovllm import LLM, TINY, SamplingParams
    from nanovllm.layers.attention import Attention

    depths: list[int] = []
    seen: set[CodeType] = set()
    forward = Attention.forward

    def is_ours(file: str) -> bool:
        return Path(file).is_relative_to(PACKAGE)

    def tapped(self: Attention, *args: Any) -> Any:
        names = [frame.name for frame in traceback.extract_stack() if is_ours(frame.filename)]
        depths.append(len(names) - names.index("generate") + 1)
        return forward(self, *args)

    def profile(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_name  # comprehensions are none
        if event == "call" and not name.startswith("<") and is_ours(frame.f_code.co_filename):
            seen.add(frame.f_code)

    params = SamplingParams(temperature=0, max_tokens=4)
    options = {"device": "cpu", "num_kvcache_blocks": 4, "overlap": True}
    with LLM(TINY, **options) as llm:  # type: ignore[arg-type]
        llm.generate("1+1=", params, use_tqdm=False)  # lazy imports
        sys.setprofile(profile)
        try:
            llm.generate("1+2=", params, use_tqdm=False)
        finally:
            sys.setprofile(None)
        Attention.forward = tapped  # type: ignore[method-assign, assignment]
        try:
            llm.generate("1+3=", params, use_tqdm=False)
        finally:
            Attention.forward = forward  # type: ignore[method-assign]
    files = {code.co_filename for code in seen}
    return {"frames": max(depths), "functions": len(seen), "files": len(files)}


def files_in_circles() -> int:
    """Files that import each other by some way, imports for type checkers too."""
    graph = grimp.build_graph("nanovllm", exclude_type_checking_imports=False)
    needs = {name: graph.find_upstream_modules(name) for name in graph.modules}
    return sum(any(name in needs[other] for other in needs[name]) for name in needs)


def measure() -> dict[str, int]:
    """Everything."""
    package = sorted(PACKAGE.rglob("*.py"))
    return {
        **run_generate(),
        "files_in_circles": files_in_circles(),
        "core_lines": num_lines([PACKAGE / name for name in core_path()]),
        "package_lines": num_lines(package),
        "longest_file": max(num_lines([path]) for path in package),
        "model_lines": num_lines([PACKAGE / "models" / "qwen3.py"]),
        "test_lines": num_lines(sorted((ROOT / "tests").rglob("*.py"))),
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    print(json.dumps(measure()))
