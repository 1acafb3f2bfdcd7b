"""Workers of a tensor-parallel engine under faults: the error, and that nothing is left behind."""

import gc
import inspect
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

import nanovllm
from checkpoints import (
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    add_all,
    assert_usable,
    copy_checkpoint,
    edit_tensors,
    rare,
    reference,
    references,
    run_steps,
    tokens,
    with_rare,
)
from faults import (
    CONNECT,
    DEADLINE,
    FAULTS,
    LOAD,
    PROMISE,
    RUN,
    SERVE,
    SIZE,
    children,
    fds,
    listeners,
    shared_memory,
    traces,
    wait_until,
    within_deadline,
)
from nanovllm import LLM, WorkerError
from nanovllm.distributed import gloo, group
from nanovllm.engine import llm_engine
from nanovllm.engine.executor import Executor
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_inputs import PendingTokens
from nanovllm.ranks import workers as workers_module
from nanovllm.ranks.channel import NUM_SLOTS
from nanovllm.ranks.workers import Workers
from nanovllm.startup.builder import Builder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")

TP2 = {**SMALL, "tensor_parallel_size": 2}
TP4 = {**SMALL, "tensor_parallel_size": 4}
NATIVE_THREADS = "/proc/self/task"

# -- what an engine could leave behind -------------------------------------------------------------


def all_traces():
    """Traces with the kinds of descriptors, except files."""
    found = traces()
    kinds = [link.partition(":")[0] for link in fds()]
    return found, Counter(kind for kind in kinds if kind[0] != "/" or kind == "/memfd")


@pytest.fixture(scope="module")
def shared(checkpoint):
    """An engine for tests that leave it usable. What PyTorch and tqdm start once is there, too."""
    with LLM(checkpoint, **TP2, overlap=True) as llm:
        llm.generate(PROMPTS, PARAMS)
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(shared):
    """Whatever a test does: no process, thread, descriptor or port is left, and no memory."""
    before, names, threads = all_traces(), shared_memory(), len(os.listdir(NATIVE_THREADS))

    def check():
        assert all_traces() == before
        wait_until(lambda: shared_memory() <= names)
        wait_until(lambda: len(os.listdir(NATIVE_THREADS)) <= threads)  # for an instant longer

    yield check
    check()


def pids(llm):
    """The workers' processes."""
    return [worker.process.pid for worker in llm.executor._workers._workers]


def assert_closed(llm):
    with pytest.raises(RuntimeError, match="this engine is closed: build a new LLM"):
        llm.generate([PROMPT])


# -- faults in a worker ----------------------------------------------------------------------------


def use(engines, path, **options):
    """All that callers do, over several steps."""
    with LLM(path, **options) as llm:
        engines.append(llm)
        add_all(llm)
        run_steps(llm)


CASES = {
    "before the ranks meet": (SERVE, "raise", {}),
    "before the ranks meet, killed": (SERVE, "kill", {}),
    "while the ranks meet": (CONNECT, "raise", {}),
    "while the ranks meet, killed": (CONNECT, "kill", {}),
    "just after the ranks met, killed": (CONNECT, "kill", {"after": True}),
    "loading": (LOAD, "GPU memory", {}),
    "loading, killed": (LOAD, "kill", {}),
    "KV-cache sizing": (SIZE, "host memory", {}),
    "prefill": (RUN, "GPU memory", {}),
    "prefill, killed": (RUN, "kill", {}),
    "decode": (RUN, "raise", {"call": 5}),
    "decode, killed": (RUN, "kill", {"call": 5}),
    "decode, left": (RUN, "leave", {"call": 5}),
    "after a step": (RUN, "abort", {"call": 5, "after": True}),
    "exit": (SERVE, "raise", {"after": True}),
    "exit, killed": (SERVE, "kill", {"after": True}),
}
USUAL = ("prefill",)  # before: `test_worker_that_cannot_start`


@pytest.mark.parametrize("case", with_rare(CASES, *CASES.keys() - USUAL))
def test_defect_13_dead_worker_gives_an_error_that_names_it(
    case, inject, checkpoint, nothing_left, record_property
):
    """A dead worker meant a hang. With overlap, a step may be under way when it dies."""
    where, fault, options = CASES[case]
    what, exit_code, message = FAULTS[fault]
    died, engines = inject(where, what, **options), []
    with pytest.raises(WorkerError) as caught:
        within_deadline(lambda: use(engines, checkpoint, **TP2, overlap=True))
    took = time.monotonic() - float(died.read_text())
    record_property("seconds to WorkerError", took)
    print(f"{took:.2f} s from the death to the error")
    assert took < PROMISE
    error = caught.value
    assert (error.rank, error.exit_code) == (1, exit_code)
    assert "the worker of rank 1" in str(error)
    assert message in str(error)
    assert bool(error.worker_traceback) == ("raise" in what)
    nothing_left()  # while the error is held
    for llm in engines:
        assert_closed(llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "fault", "rank", "options"),
    [
        (CONNECT, "kill", 2, {}),
        (LOAD, "raise", 3, {}),
        (RUN, "kill", 2, {}),
        (RUN, "raise", 1, {"call": 5}),
    ],
    ids=["meeting", "loading", "prefill", "decode"],
)
def test_error_names_the_rank_that_died(where, fault, rank, options, inject, checkpoint):
    """The others lose contact with it, and with each other, and end by that."""
    what, exit_code, message = FAULTS[fault]
    inject(where, what, rank=rank, **options)
    with pytest.raises(WorkerError, match=message) as caught:
        within_deadline(lambda: use([], checkpoint, **TP4))
    assert (caught.value.rank, caught.value.exit_code) == (rank, exit_code)


# Loses its connections first, so that another rank ends before it.
DIES_LATE = f"""\
import contextlib, socket
{inspect.getsource(children)}
for fd in map(int, os.listdir("/proc/self/fd")):
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=os.dup(fd))
        if sock.family == socket.AF_INET and sock.getpeername():  # listens not
            sock.shutdown(socket.SHUT_RDWR)
while not any("Z" in Path(f"/proc/{{pid}}/stat").read_text() for pid in children(os.getppid())):
    time.sleep(0.001)
raise LookupError("injected")"""


@pytest.mark.slow
def test_error_does_not_name_a_rank_that_ended_before(inject, checkpoint, monkeypatch):
    """Losing contact is a consequence, even if it is noticed before its cause."""
    monkeypatch.setattr(workers_module, "BLAME_TIMEOUT", DEADLINE)
    inject(RUN, textwrap.indent(DIES_LATE, "    ").strip(), rank=2)
    with pytest.raises(WorkerError, match="LookupError: injected") as caught:
        within_deadline(lambda: use([], checkpoint, **TP4))
    assert caught.value.rank == 2


@pytest.mark.slow  # four ranks: of two, `test_defect_13` has one that dies while the other waits
def test_a_death_ends_the_wait_for_a_rank_that_is_stuck(checkpoint):
    """Rank 0 waits for ranks that do not answer, while another one dies."""
    llm = LLM(checkpoint, **TP4)
    add_all(llm)
    first, second, third = pids(llm)
    os.kill(first, signal.SIGSTOP)
    os.kill(third, signal.SIGSTOP)
    wait = llm.model_runner.launch

    def run(*args):
        os.kill(second, signal.SIGKILL)
        return wait(*args)

    llm.model_runner.launch = run
    with pytest.raises(WorkerError, match="SIGKILL") as caught:
        within_deadline(llm.step)
    assert caught.value.rank == 2


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["set", "wait"])
def test_death_in_the_middle_of_the_meeting(moment, inject, checkpoint, monkeypatch):
    """One that has arrived, but never tells its address, or tells it and is gone: PyTorch waited
    for it without end, and nothing could interrupt that.
    """
    store = f"""\
    from nanovllm.distributed import store
    class Fragile(store.Store):
        sets = 0
        def set(self, key, value):
            self.sets += 1
            if self.sets == 2 and {moment!r} == "set":
                os.kill(os.getpid(), 9)
            super().set(key, value)
        def wait(self, *args):
            if self.sets == 2:
                os.kill(os.getpid(), 9)
            super().wait(*args)
    store.Store = Fragile"""
    inject(SERVE, textwrap.indent(textwrap.dedent(store), "    ").strip())
    monkeypatch.setattr(gloo, "MEETING", timedelta(seconds=1))
    with pytest.raises(WorkerError, match="SIGKILL"):
        within_deadline(lambda: LLM(checkpoint, **TP2))
    # Only its time limit ends Gloo's wait for a connection: the thread may outlive the error.
    wait_until(lambda: not any("_meet" in thread.name for thread in threading.enumerate()))


def test_death_while_this_rank_loads(inject, checkpoint, monkeypatch, tmp_path):
    """Loading takes long and talks to nobody: it went on to the end without the dead worker."""
    loading = tmp_path / "loading"
    once_it_loads = f"while not os.path.exists({str(loading)!r}): time.sleep(0.001)"
    inject(LOAD, f"{once_it_loads}\n    raise LookupError('injected')")
    executors, loaded = [], []
    launch = Executor.launch
    monkeypatch.setattr(Executor, "launch", lambda self: executors.append(self) or launch(self))

    def fill(shard, source):
        loaded.append(shard)
        loading.touch()
        wait_until(lambda: executors[0]._group._is_aborted)

    monkeypatch.setattr("nanovllm.layers.weights.shard.Shard.fill", fill)
    with pytest.raises(WorkerError, match="injected"):
        LLM(checkpoint, **TP2)
    assert len(loaded) == 1
    executors.clear()


@pytest.mark.slow  # `test_defect_13` has deaths within calls
@pytest.mark.parametrize("then", ["step", "exit"])
def test_death_between_two_calls(then, checkpoint, nothing_left):
    """While the caller does something else; the next call says so, whichever it is."""
    llm = LLM(checkpoint, **TP2)
    add_all(llm)
    llm.step()
    os.kill(pids(llm)[0], signal.SIGKILL)
    if then == "exit":  # `step` shall meet it noticed or not
        wait_until(lambda: llm.executor._workers.failure)
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        within_deadline(getattr(llm, then))
    assert_closed(llm)
    llm.exit()
    nothing_left()


def test_error_keeps_no_half_built_engine(checkpoint, monkeypatch):
    """Frames of the traceback held what rank 0 had on its device."""
    builders, init = [], Builder.__init__

    def recording(self, *args):
        builders.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(Builder, "__init__", recording)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError) as caught:
        LLM(checkpoint, **TP2)
    gc.collect()
    assert [builder() for builder in builders] == [None]
    del caught  # not earlier


def test_worker_that_cannot_start(checkpoint, monkeypatch, tmp_path):
    """A Python that ends at once, before it has read a byte, and one that is not there."""
    popen = workers_module.start_python

    def ended(*args, **options):
        process = popen(*args, **options)
        process.wait()
        return process

    monkeypatch.setattr(sys, "executable", "/bin/false")
    for start in (popen, ended):
        monkeypatch.setattr(workers_module, "start_python", start)
        with pytest.raises(WorkerError, match="exit code 1"):
            within_deadline(lambda: LLM(checkpoint, **TP2))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        LLM(checkpoint, **TP2)


# -- faults in the caller's process ----------------------------------------------------------------


@pytest.mark.slow  # one rank is in test_loader.py, and errors of rank 0 are below
def test_mistake_in_a_checkpoint_is_a_plain_value_error(checkpoint, tmp_path, monkeypatch):
    """All ranks meet it. That the death of another is noticed first must not matter."""
    path = copy_checkpoint(checkpoint, tmp_path / "broken")
    edit_tensors(path, model__norm__weight=None)
    load, launch, executors = Builder.load, Executor.launch, []
    monkeypatch.setattr(Executor, "launch", lambda self: executors.append(self) or launch(self))

    def late(*args):
        wait_until(lambda: executors[0]._workers.failure)
        load(*args)

    monkeypatch.setattr(Builder, "load", late)
    with pytest.raises(ValueError, match=r"missing from the checkpoint: model\.norm\.weight"):
        LLM(path, **TP2)
    executors.clear()


def test_error_of_rank_0_closes_the_engine(checkpoint, monkeypatch, nothing_left):
    """The others wait for it in the middle of a step, and are not waited for."""
    llm = LLM(checkpoint, **TP2)
    add_all(llm)
    run_steps(llm, 2)
    monkeypatch.setattr(workers_module, "EXIT_TIMEOUT", 10 * DEADLINE)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "launch", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            within_deadline(llm.step)
        patch.undo()
    assert_closed(llm)
    nothing_left()


def interrupt_at(monkeypatch, owner, name, k=1, *, after=False):
    """Ctrl-C in the k-th call of a function, before or after its work."""
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == k and not after:
            signal.raise_signal(signal.SIGINT)
        result = original(*args, **kwargs)
        if len(calls) == k and after:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, wrapped)
    return calls


def test_engine_is_usable_after_ctrl_c(shared, checkpoint, monkeypatch):
    """Half a step, done by some ranks only, left them out of step for ever: wrong tokens, hangs."""
    points = [
        (shared.executor._workers, "call", False),
        (shared.executor._workers, "call", True),
        (shared.model_runner, "launch", True),
        (PendingTokens, "wait", False),
        (shared.executor, "wait", True),
        (shared.scheduler, "postprocess", False),
    ]
    for owner, name, after in points:
        for k in (1, 4):
            with monkeypatch.context() as patch:
                calls = interrupt_at(patch, owner, name, k, after=after)
                with pytest.raises(KeyboardInterrupt):
                    shared.generate(PROMPTS, PARAMS, use_tqdm=False)
                assert len(calls) == k, name
            assert_usable(shared, checkpoint)
    pressed = []
    mine = signal.signal(signal.SIGINT, lambda *args: pressed.append(args[0]))
    try:  # the caller's own handler, that does not raise
        with monkeypatch.context() as patch:
            interrupt_at(patch, shared.model_runner, "launch", 2)
            outputs = shared.generate(PROMPTS, PARAMS, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, mine)
    assert pressed == [signal.SIGINT]
    assert tokens(outputs) == references(checkpoint)


INTERRUPTED = [
    (workers_module, "start_python", True),
    rare(Builder, "load", False),
    rare(Executor, "_connect", False),
    rare(Scheduler, "__init__", False),
    rare(workers_module, "start_python", False),
    rare(Workers, "_start", True),
    rare(llm_engine, "load_tokenizer", False),
    rare(Builder, "allocate_kv_cache", True),
]


@pytest.mark.parametrize(("owner", "name", "after"), INTERRUPTED)
def test_ctrl_c_in_construction_leaves_nothing(owner, name, after, checkpoint, monkeypatch):
    """Workers that have been started, or half started, ran on."""
    monkeypatch.setattr(workers_module, "EXIT_TIMEOUT", DEADLINE)  # they are not waited for
    begin = time.monotonic()
    calls = interrupt_at(monkeypatch, owner, name, after=after)
    with pytest.raises(KeyboardInterrupt):
        LLM(checkpoint, **TP2)
    assert calls
    assert time.monotonic() - begin < DEADLINE


# -- the end ---------------------------------------------------------------------------------------


def test_defect_14_every_end_gives_all_back(checkpoint, nothing_left, monkeypatch):
    """`del llm` freed nothing, and `exit()` twice raised (here after Ctrl-C in the first)."""
    llm = LLM(checkpoint, **TP2)
    llm.me = llm
    add_all(llm)
    llm.step()
    del llm
    nothing_left()

    llm = LLM(checkpoint, **TP2, overlap=True)
    add_all(llm)
    run_steps(llm, 2)  # the workers may still be in the second
    with monkeypatch.context() as patch:
        interrupt_at(patch, Workers, "close")
        with pytest.raises(KeyboardInterrupt):
            llm.exit()
    nothing_left()
    llm.exit()
    assert_closed(llm)


@pytest.mark.slow  # nor does that after an error of rank 0, above
def test_exit_does_not_wait_for_a_stuck_worker(checkpoint, monkeypatch, nothing_left):
    """One that does not end by itself is killed; nobody has lost anything by that."""
    monkeypatch.setattr(workers_module, "EXIT_TIMEOUT", 0.1)
    llm = LLM(checkpoint, **TP2)
    os.kill(pids(llm)[0], signal.SIGSTOP)
    within_deadline(lambda: llm.exit() or True)
    nothing_left()


# -- scripts ---------------------------------------------------------------------------------------

PRELUDE = """
import atexit, contextlib, ctypes, os, resource, signal, sys, threading
from pathlib import Path
started = []
{at_exit}  # after what is registered later
from nanovllm import LLM, SamplingParams, WorkerError
from nanovllm.distributed.group import Group
from nanovllm.ranks import workers
from nanovllm.engine.executor import Executor
from nanovllm.startup.builder import Builder
{children}
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
popen = workers.start_python
def record(*args, **options):
    process = popen(*args, **options)
    started.append(process.pid)
    return process
workers.start_python = record
def build():
    return LLM({path!r}, overlap=True, **{options})
def generate(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6)
    return llm.generate([{prompt}], params, use_tqdm=False)[0]["token_ids"]
"""


@pytest.fixture
def start_script(checkpoint, tmp_path):
    """Starts a script after the prelude, as a file or on standard input, and gives its process."""
    started = []

    def start(code, *, at_exit="", by_stdin=False):
        prelude = PRELUDE.format(
            children=inspect.getsource(children),
            path=str(checkpoint),
            options=TP2,
            prompt=PROMPT,
            at_exit=at_exit,
        )
        file = tmp_path / f"script{len(started)}.py"
        file.write_text(prelude + textwrap.dedent(code))
        script = subprocess.Popen(
            [sys.executable, "-" if by_stdin else str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(nanovllm.__file__).parents[1])},
            text=True,
        )
        if by_stdin:
            script.stdin.write(file.read_text())
            script.stdin.flush()
        started.append(script)
        return script

    yield start
    for script in started:
        script.kill()
        script.communicate()


CRASHES = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    "os._exit": ("os._exit(7)", 7),
    "segmentation fault": ("ctypes.string_at(0)", -11),
}
# Where the caller is: `reach` prints the processes, and crashes when it is told to.
MOMENTS = {
    "while workers start": "Executor._connect = lambda *args: reach(); build()",
    "while the ranks meet": "Group.connect = lambda *args: reach(); build()",
    "while workers load": "Builder.load = lambda *args: reach(); build()",
    "idle": "llm = build(); reach()",
    "within a step": """
llm = build()
llm.model_runner.launch = lambda *args: reach()
generate(llm)
""",
    "with a child": """
llm = build()
def run(*args):
    child = os.fork()
    if not child:
        signal.pause()
    reach(child)
llm.model_runner.launch = run
generate(llm)
""",
}


def in_two(every, seldom):
    """Two parameters, of names that one test takes at once; only `-m slow` tries `seldom`."""
    assert every.keys() > seldom
    usual = pytest.param(every.keys() - seldom, id="usual")
    return [usual, pytest.param(seldom, id="rare", marks=pytest.mark.slow)]


RARE_MOMENTS = MOMENTS.keys() - {"with a child"}


@pytest.mark.parametrize("moments", in_two(MOMENTS, RARE_MOMENTS))
def test_defect_12_crash_of_the_caller_leaves_nothing(moments, start_script, checkpoint):
    """Workers of a crashed caller ran on, and the name of their memory made later starts fail. A
    child that it forked holds all of its sockets open.
    """
    pairs = zip(MOMENTS, [*CRASHES, "SIGKILL", "SIGKILL"], strict=True)
    scripts = {}
    for moment, crash in pairs:
        if moment not in moments:
            continue
        code = f"""
def reach(child=0):
    print(child, *started, flush=True)
    sys.stdin.readline()
    {CRASHES[crash][0]}
{MOMENTS[moment]}
"""
        scripts[f"{crash} {moment}"] = (start_script(code), CRASHES[crash][1])
    for name, (script, exit_code) in scripts.items():
        child, worker = map(int, script.stdout.readline().split())
        pidfd = os.pidfd_open(worker)
        try:
            script.stdin.write("\n")
            script.stdin.flush()
            assert script.wait(DEADLINE) == exit_code, name
            assert select.select([pidfd], [], [], DEADLINE)[0], f"{name}: the worker lives"
        finally:
            os.close(pidfd)
            if child:
                os.kill(child, signal.SIGKILL)
        _, err = script.communicate(timeout=DEADLINE)  # nobody holds its pipes
        assert not err, name


SCRIPTS = {  # code, exit code, the last line of standard error
    "on standard input": ("llm = build(); print(generate(llm))", 0, ""),
    "in a thread": ("threading.Thread(target=lambda: print(generate(build()))).start()", 0, ""),
    "with a daemon thread in a step": (
        """
        llm, ready = build(), threading.Event()
        print(generate(llm))
        def work():
            while True:
                generate(llm)
                ready.set()
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
        """,
        0,
        None,  # the thread may tell of its end
    ),
    "with SIGPIPE as in a shell's filter": (
        """
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        llm = build()
        print(generate(llm))
        os.kill(started[0], signal.SIGKILL)
        while not llm.executor._workers.failure:
            pass
        workers.Workers.check = lambda self: None  # as if it had not been noticed yet
        try:
            generate(llm)
        except WorkerError:
            sys.exit(5)
        """,
        5,
        "",
    ),
    "ended by a handler in the middle of a step": (
        """
        workers.EXIT_TIMEOUT = 1000  # the workers wait for this rank, and are not waited for
        signal.signal(signal.SIGTERM, lambda *args: sys.exit(4))
        llm = build()
        print(generate(llm))
        llm.model_runner.launch = lambda *args: signal.raise_signal(signal.SIGTERM)
        generate(llm)
        """,
        4,
        "",
    ),
    "with Ctrl-C in its terminal, ended by an error": (
        """
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        llm = build()
        run = llm.model_runner.launch
        def interrupted(*args):
            llm.model_runner.launch = run
            os.killpg(0, signal.SIGINT)
            return run(*args)
        llm.model_runner.launch = interrupted
        try:
            generate(llm)
        except KeyboardInterrupt:
            print(generate(llm))
        1 / 0
        """,
        1,
        "ZeroDivisionError",
    ),
    "with a child that leaves first": (
        """
        llm = build()
        child = os.fork()
        if not child:
            try:
                generate(llm)
            except RuntimeError as error:
                assert "forked" in str(error)
            llm.exit()  # is the parent's
            del llm
            sys.exit(6)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
        print(generate(llm))
        """,
        0,
        "",
    ),
}


RARE_SCRIPTS = SCRIPTS.keys() - {"with Ctrl-C in its terminal, ended by an error"}


@pytest.mark.parametrize("names", in_two(SCRIPTS, RARE_SCRIPTS))
def test_scripts_start_and_end_cleanly(names, start_script, checkpoint):
    """Whatever a script looks like and however it ends: as many workers as it needs and no more,
    right tokens, its own exit code, and no worker that keeps its pipes open. All at once, too.
    """
    count = """
def count():
    if os.getpid() == me:
        print(len(started), len(children()), *started)
me = os.getpid()
atexit.register(count)"""
    scripts = {
        name: start_script(code, at_exit=count, by_stdin=name == "on standard input")
        for name, (code, _, _) in SCRIPTS.items()
        if name in names
    }
    for name, script in scripts.items():
        out, err = script.communicate(timeout=DEADLINE)
        found, _, left = out.partition("\n")
        assert found == str(reference(checkpoint, PROMPT, 6)), (name, out, err)
        assert left, (name, script.returncode, err)
        num_started, num_left, worker = left.split()
        assert (num_started, num_left) == ("1", "0"), name
        assert not Path("/proc", worker).exists(), name
        _, exit_code, last_line = SCRIPTS[name]
        assert script.returncode == exit_code, (name, err)
        if last_line is not None:
            assert err.strip().rpartition("\n")[2].startswith(last_line), (name, err)
            assert last_line or not err, (name, err)


# -- several engines, slow workers -----------------------------------------------------------------


def test_defect_12_engines_share_nothing(shared, checkpoint, monkeypatch):
    """A fixed port and a fixed name of shared memory allowed one engine on a host, and one rank had
    a process group, too. The store through which ranks met listened on 127.0.0.1, without a secret,
    for the engine's life: other users of the machine could list and change its keys.
    """
    before, mine = children(), listeners()
    with LLM(checkpoint, **SMALL) as alone:
        assert children() == before
        assert listeners() == mine
        calls, met = [], []
        for name in ("arrive", "connect"):
            original = getattr(group.Group, name)

            def recording(*args, name=name, original=original):
                calls.append(name)
                if name == "arrive":  # all ranks are there and wait to meet
                    workers = children() - before
                    met.extend([listeners() - mine, *map(listeners, workers)])
                original(*args)

            monkeypatch.setattr(group.Group, name, recording)
        with LLM(checkpoint, **TP2) as two:
            assert calls == ["arrive", "connect"]
            assert len(met) == 2 and not any(met)
            added = [listeners() - mine, *map(listeners, pids(two))]
            assert [len(addresses) for addresses in added] == [1, 1], "more than Gloo's own"
            engines, done = [alone, shared, two], [{}, {}, {}]
            ids = [add_all(llm) for llm in engines]
            while not all(llm.is_finished() for llm in engines):
                for llm, outputs in zip(engines, done, strict=True):
                    outputs.update(run_steps(llm, 1))
            for own, outputs in zip(ids, done, strict=True):
                assert [outputs[i] for i in own] == references(checkpoint)
            assert children() - before == {*pids(two)}
            for pid in ("self", *pids(shared), *pids(two)):
                assert all(address.startswith("0100007F:") for address in listeners(pid)), "public"
                named = re.findall(r"/dev/shm/\S+$", Path(f"/proc/{pid}/maps").read_text(), re.M)
                assert not named
            two.exit()
            assert_usable(shared, checkpoint)


def test_defect_11_stuck_worker_loses_no_message(shared, checkpoint):
    """Rank 0 runs ahead until the channel is full, and goes on when the worker does."""
    workers, [worker], sent = shared.executor._workers, pids(shared), []
    total = 10 * NUM_SLOTS

    def send():
        for i in range(total):
            workers.wait_for_room()
            workers.call("__setattr__", f"note{i}", i)
            sent.append(i)
        return True

    os.kill(worker, signal.SIGSTOP)
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    wait_until(lambda: len(sent) == NUM_SLOTS)
    assert not workers._channel.has_room()
    os.kill(worker, signal.SIGCONT)
    thread.join(DEADLINE)
    assert len(sent) == total
    for i in range(total):
        workers.wait_for_room()
        workers.call("__delattr__", f"note{i}")  # an error if it did not get that one
    assert_usable(shared, checkpoint)

    results = []
    os.kill(worker, signal.SIGSTOP)
    thread = threading.Thread(
        target=lambda: results.append(shared.generate(PROMPTS, PARAMS, use_tqdm=False)),
        daemon=True,
    )
    thread.start()
    wait_until(lambda: shared.scheduler.running)
    os.kill(worker, signal.SIGCONT)
    thread.join(DEADLINE)
    assert tokens(results[0]) == references(checkpoint)


def resident_memory():
    """MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_forty_engines_one_after_the_other(checkpoint, nothing_left):
    """Leftovers of each would add up overnight."""
    expected, memory = references(checkpoint), []
    for _ in range(40):
        with LLM(checkpoint, **TP2) as llm:
            assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        nothing_left()
        memory.append(resident_memory())
    shown = ", ".join(f"{memory[i]:.1f}" for i in (0, 4, 9, 19, 39))
    print(f"resident memory after 1, 5, 10, 20 and 40 engines: {shown} MiB")
    assert memory[39] < memory[9] + 5  # the weights alone have 0.4 in each


def test_error_survives_a_pool_of_processes():
    """Where engines run in workers of somebody else's, errors are pickled on their way."""
    error = pickle.loads(pickle.dumps(WorkerError(3, -40, "Traceback ...")))
    assert (error.rank, error.exit_code, error.worker_traceback) == (3, -40, "Traceback ...")
    assert str(error).startswith("the worker of rank 3 was killed by signal 40 (exit code -40)")
