"""Scripts of examples/ as users run them, and what their pages in docs/tasks/ say of them."""

import os
import re
import shlex
from pathlib import Path

from forks import Forks

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
PAGES = {path.stem: path for path in (ROOT / "docs" / "tasks").glob("*.md") if path.stem in SCRIPTS}
# On a CPU, with one thread: those of two processes would wait for each other.
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SECONDS = 300  # only to turn a hang into a failure


def environment() -> dict[str, str]:
    """Environment of a user's process, where kernels are not interpreted as in these tests."""
    found = {**os.environ, **SETTINGS, "TQDM_DISABLE": "1"}
    found.pop("TRITON_INTERPRET", None)
    return found


class Runner:
    """Runs scripts, each in a process and a directory of its own. To be closed."""

    def __init__(self) -> None:
        self._forks = Forks(**SETTINGS, TRITON_INTERPRET=None)

    def __call__(self, name: str, *args: str, directory: Path) -> str:
        """Output of a script."""
        printed = directory / ".printed"
        printed.touch()
        call = {"script": str(SCRIPTS[name]), "cwd": str(directory), "stdout": str(printed)}
        code, said = self._forks(*args, **call)
        assert code == 0, said
        return printed.read_text("utf-8")

    def close(self) -> None:
        self._forks.close()


def blocks(name: str, language: str = "") -> list[str]:
    """Fenced blocks of a page."""
    page = PAGES[name].read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


def first_command(name: str) -> tuple[list[str], str]:
    """The arguments of the first command of a page, and what the page says that it prints."""
    command, output, *_ = blocks(name)
    program, script, *args = shlex.split(command.splitlines()[-1])
    assert (program, script) == ("python", f"examples/{name}.py")
    return args, output
