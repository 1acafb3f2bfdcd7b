"""Kernels that other processes compile: for a GPU that is not there, in `compile_run.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

OURS = "_rms_norm_kernel", "_act_and_mul_kernel", "_fill_in_kernel"
TESTS = Path(__file__).parents[1]


def run(script: str, *args: str, **env: str) -> Any:
    """Output of a script in a process that compiles kernels."""
    own = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    own |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env}
    command = [sys.executable, TESTS / script, *args]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory, cache = (str(tmp_path_factory.mktemp(name)) for name in ("files", "cache"))
    return run("compile_run.py", directory, TRITON_CACHE_DIR=cache)


def test_a_kernel_that_is_launched_while_it_is_pending_goes_first(found: Any) -> None:
    """It is waited for, and none that was rehearsed is compiled by the process that launches."""
    case = found["launched_while_it_is_pending"]
    first, second, last = case["rehearsed"]
    assert case["pending"] == 3 and case["launched in it"] == []
    assert case["first"] == [last]
    assert case["compiled"] == [first, last, second]
    assert sorted(case["heard"]) == sorted([name, True] for name in case["rehearsed"])


def test_of_kernels_that_wait_the_longest_goes_first(found: Any) -> None:
    """They come after those of earlier rehearsals, and all after the very first one."""
    long, short, shortest = OURS
    assert found["compiled_in_order"] == {
        "longest first": [short, long, shortest],
        "rehearsal by rehearsal": [shortest, short, long],
    }


def test_a_rehearsal_launches_nothing_and_submits_what_no_cache_has(found: Any) -> None:
    case = found["rehearsed_again"]
    assert case["has"] == [], "this process has it"
    assert case["launched"] == ["_act_and_mul_kernel"], "by another thread"
    assert case["zeros"] and case["restored"]
    assert len(case["on disk"]) == 3 and case["pending"] == 0


def test_what_others_do_not_compile_is_compiled_at_its_launch(found: Any) -> None:
    """Also while others wait for a kernel that never comes, until the end of all."""
    case = found["compiled_badly"]
    assert case["rehearsed"] == ["dies_kernel", "hangs_kernel", "wrong_kernel"]
    assert case["launched"] == ["dies_kernel"] and ["dies_kernel", False] in case["heard"]
    assert "error" in case, "at the launch of a wrong one, and not before"
    assert case["waits"] and case["pending"] == 1 and case["there"] == [True, True]
    assert case["at last"] == ["hangs_kernel"] and not case["left"]


def test_without_a_server_nothing_waits_and_one_warning_comes(found: Any) -> None:
    case = found["served_by_nobody"]
    assert case["launched"] == ["stays_kernel", "late_kernel"] and case["pending"] == 0
    [warning] = case["warnings"]
    assert "the compile server has ended" in warning


def test_threads_rehearse_one_after_the_other(found: Any) -> None:
    """Or the second would put the first's functions back in place, for good."""
    assert found["rehearsed_side_by_side"] == {"restored": True, "launched": []}


def test_keys_of_kernels_are_those_of_every_process() -> None:
    """Whatever is used first, and without torch, as where kernels are compiled."""
    one, other, server = (run("kernel_keys.py", *how) for how in (["1"], ["2"], ["1", "server"]))
    assert len(one) > 100
    assert one == other == server
