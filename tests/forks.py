"""Runs the command line and scripts in forked processes, which need not import torch again.

Run as a script, this reads calls, a line of JSON each, and answers with a line. A call has `argv`;
`script`, in place of the command line, and `cwd`; files as `stdin` and `stdout`; `closed`: nobody
reads its standard output; `signal` and `at`: see `signal_at`; `part_rows`: of a file of Parquet.
"""

import faulthandler
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

DEADLINE = 120  # seconds, only to turn a hang into a failure


class Forks:
    """Runs of this script from outside; `env` adds to the environment, None removes a name."""

    def __init__(self, **env):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **env}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in env.items() if value is not None},
        )

    def __call__(self, *argv, **call):
        """The exit code, or minus the signal that ended it, and what it said on standard error."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"argv": [*map(str, argv)], **call}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], answer["stderr"]

    def close(self):
        self._process.communicate()


def size_of(path: Path) -> int:
    """Bytes of a file, or of those in a directory."""
    try:
        return sum(map(size_of, path.iterdir())) if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return 0


def signal_at(output: Path, at: int, number: signal.Signals):
    """Send this process a signal when the output has so many bytes: within a line as a rule, behind
    a file of Parquet. From outside it could come when all is done.
    """
    assert output.is_dir() or size_of(output) < at
    write, replace = os.write, os.replace

    def writing(fd, data):
        if output.is_file() and os.path.samestat(os.fstat(fd), output.stat()):
            room = at - size_of(output)
            if 0 < room <= len(data):
                count = write(fd, data[:room])
                os.kill(os.getpid(), number)
                return count
        return write(fd, data)

    def replacing(source, target):
        replace(source, target)
        if output.is_dir() and size_of(output) >= at:
            os.kill(os.getpid(), number)

    os.write, os.replace = writing, replacing


def child(call, stderr):
    """The command or the script, in this process."""
    from nanovllm.batch import parts
    from nanovllm.cli.main import main

    parts.PART_ROWS = call.get("part_rows", parts.PART_ROWS)
    os.dup2(os.open(call.get("stdin", os.devnull), os.O_RDONLY), 0)
    target = os.open(call.get("stdout", os.devnull), os.O_WRONLY)
    if call.get("closed"):
        read, target = os.pipe()
        os.close(read)
    os.dup2(target, 1)
    os.dup2(stderr, 2)
    faulthandler.dump_traceback_later(DEADLINE, exit=True, file=stderr)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open(fd, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    os.chdir(call.get("cwd", "."))
    if "signal" in call:
        output = Path(call["argv"][call["argv"].index("--output") + 1])
        signal_at(output, call["at"], signal.Signals[call["signal"]])
    code = 70
    try:
        if "script" in call:
            sys.argv = [call["script"], *call["argv"]]
            runpy.run_path(call["script"], run_name="__main__")
            code = 0
        else:
            code = main(call["argv"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def serve():
    """Answer calls."""
    from transformers import AutoTokenizer  # noqa: F401

    import nanovllm.llm  # noqa: F401

    gc.freeze()  # engines collect garbage when they end: children would copy all there is to look
    for line in sys.stdin:
        call = json.loads(line)
        stderr = os.memfd_create("stderr")
        pid = os.fork()
        if not pid:
            child(call, stderr)
        status = os.waitpid(pid, 0)[1]
        os.lseek(stderr, 0, os.SEEK_SET)
        with open(stderr, encoding="utf-8") as file:
            answer = {"code": os.waitstatus_to_exitcode(status), "stderr": file.read()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
