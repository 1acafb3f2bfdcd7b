"""Bounds on a reader's way through the code, and the truth of the documented reading order."""

import ast
import functools
import re
from pathlib import Path

import grimp
import pytest
from structure import PACKAGE, ROOT, core_path, measure, num_lines, reading_order

# Frames of `LLM.generate` to attention; functions with a name, and files, of one `generate`.
CEILINGS = {
    "frames": 13,
    "functions": 240,  # eight of them ask whether prompts have images
    "files": 50,
    "files_in_circles": 0,
}
LONGEST_FUNCTION = 60
MAX_FILES = 16  # of a folder


def test_a_reader_has_no_longer_way() -> None:
    found = measure()
    print(found)
    assert {key: found[key] for key, most in CEILINGS.items() if found[key] > most} == {}


def test_no_folder_has_more_files_than_a_reader_can_hold() -> None:
    crowded = {}
    for name in ("nanovllm", "benchmarks", "docs", "examples", "scripts"):
        for folder in (ROOT / name, *(p for p in (ROOT / name).rglob("*") if p.is_dir())):
            files = [path for path in folder.iterdir() if path.is_file()]
            if folder.name != "__pycache__" and len(files) > MAX_FILES:
                crowded[str(folder.relative_to(ROOT))] = len(files)
    assert not crowded


def test_functions_fit_a_screen() -> None:
    long = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long[f"{path}: {node.name}"] = length
    assert not long


def test_a_mistake_of_the_users_has_no_frames_of_libraries() -> None:
    """The sentence says what is wrong; its cause would stand above it, sixty lines for a wrong name
    on the hub. `raise ... from None`, or a raise after the handler.
    """
    shown = []
    for path in PACKAGE.rglob("*.py"):
        handlers = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if _is_handler(n)]
        for node in (node for handler in handlers for node in ast.walk(handler)):
            if isinstance(node, ast.Raise) and _is_mistake(node.exc) and not _is_none(node.cause):
                shown.append(f"{path}:{node.lineno}")
    assert not shown


def _is_handler(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler)


def _is_mistake(raised: ast.expr | None) -> bool:
    """Whether it is an error that is made there, for a user."""
    return isinstance(raised, ast.Call) and ast.unparse(raised.func).endswith(
        ("TypeError", "ValueError", "OSError", "BlockingIOError", "ArgumentTypeError")
    )


def _is_none(cause: ast.expr | None) -> bool:
    return isinstance(cause, ast.Constant) and cause.value is None


def test_the_import_contract_lists_every_file_of_the_engine() -> None:
    """It is told apart from rooms by its files, of which there are few."""
    contract = (ROOT / "pyproject.toml").read_text("utf-8").split("[tool.importlinter]")[1]
    listed = re.findall(r"\bengine\.(\w+)", contract)
    files = {path.stem for path in (PACKAGE / "engine").glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(files) and len(files) < 16


def test_reading_order_names_every_file_once_with_its_lines() -> None:
    core = core_path()
    for name, lines in core.items():
        true = num_lines([PACKAGE / name])
        assert abs(true - lines) <= max(10, 0.1 * true), f"{name} has {true} lines"
    named = re.findall(r"`([\w/]+\.py)`", reading_order())
    files = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if num_lines([p]) > 5}
    assert sorted(named) == sorted(files)
    for part, total, row in re.findall(r"^\| ([\w ]+) \| (\d+) \| (.*) \|$", reading_order(), re.M):
        true = num_lines([PACKAGE / name for name in re.findall(r"`([\w/]+\.py)`", row)])
        assert abs(true - int(total)) <= 0.1 * true, f"{part} has {true} lines"


def test_the_drawing_has_every_room() -> None:
    drawing = (ROOT / "docs/architecture.md").read_text("utf-8").split("```")[1]
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= {*re.findall(r"\w+", drawing)}


def test_readme_says_how_many_lines_there_are() -> None:
    [said] = re.findall(r"About ([\d,]+) lines of Python", (ROOT / "README.md").read_text("utf-8"))
    assert abs(measure()["package_lines"] - int(said.replace(",", ""))) <= 1000


ROOMS = sorted(path.parent for path in PACKAGE.rglob("*/__init__.py"))


@functools.cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("nanovllm", exclude_type_checking_imports=False)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(PACKAGE)))
def test_a_room_is_entered_by_its_doors(room: Path) -> None:
    """Its `__init__` says its duty in a sentence, and names the files that others import."""
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8")))
    assert said, "its duty"
    duty, _, rest = said.partition("\n\n")
    assert duty.rstrip().endswith(".")
    graph, name = imports(), ".".join(room.relative_to(ROOT).parts)
    entered = {
        module.rpartition(".")[2]
        for module in graph.find_children(name)
        if not graph.find_children(module)
        and any(
            importer != name and not importer.startswith(f"{name}.")
            for importer in graph.find_modules_that_directly_import(module)
        )
    }
    if "very file is a door" in said:
        return
    doors = re.search(r"^Doors?: (.*?)(?:\n\n|\Z)", rest, re.M | re.S)
    assert doors, "its doors"
    named = {stem for stem in re.findall(r"`(\w+)`", doors[1]) if (room / f"{stem}.py").exists()}
    assert entered <= named, f"entered elsewhere: {entered - named}"
    by_scripts = {"mends", "server"}  # which tests and other processes import
    assert named <= entered | by_scripts, f"no door: {named - entered}"


def test_no_room_has_more_files_than_can_be_seen_at_once() -> None:
    counts = {room: len([*room.glob("*.py")]) for room in [PACKAGE, *ROOMS]}
    assert {room: count for room, count in counts.items() if count > 16} == {}
