"""Answer a file of prompts.

Rows are objects in JSON, rows of Parquet or lines of text, with a prompt or messages and any
sampling parameters of their own; the flags here are for rows that have none. Results are written as
they are finished. The same command, run again, continues where it ended, for whatever reason.

exit codes:
  0    every row has its answer
  1    every row is in the output, some with an error in the place of an answer
  2    a mistake in the call: nothing was computed
  3    the engine failed
  4    input or output failed: a full disk, say
  130  stopped by Ctrl-C (143: by SIGTERM), in order
  141  the reader of standard output has gone
"""

import argparse
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

from nanovllm.adapters.directory import adapter_directories
from nanovllm.batch.ahead import Ahead
from nanovllm.batch.identity import default_params, describe_job
from nanovllm.batch.job import run as run_job
from nanovllm.batch.reading import INPUT_FORMATS, STANDARD, count_rows, format_of, read_rows
from nanovllm.batch.rows import Row
from nanovllm.batch.sink import OUTPUT_FORMATS, ResumableSink, StreamSink
from nanovllm.checkpoint.hub import checkpoint_directory
from nanovllm.cli.job_report import Report, say
from nanovllm.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    object_value,
    sampling_options,
)
from nanovllm.config import Config, our_options
from nanovllm.images.picture import NoPillowError
from nanovllm.sampling_params import SamplingParams

ANSWERED, SOME_ERRORS, ENGINE_FAILED, FILE_FAILED = 0, 1, 3, 4
BY_SIGNAL = 128  # plus the signal's number, as in shells
WRONG_NAMES = (
    *(FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError),
    BlockingIOError,  # another process has the output
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add = parser.add_argument
    add(
        "--model",
        help="directory of a checkpoint, or its name on the hub (required, so that a job never "
        "runs on the package's small model by accident)",
    )
    add("--input", required=True, metavar="FILE", help="rows; - for standard input")
    add("--output", default=STANDARD, metavar="FILE", help="results; - (default): standard output")
    add("--input-format", choices=INPUT_FORMATS, help="default: by the name, for - jsonl")
    add(
        "--output-format",
        choices=OUTPUT_FORMATS,
        help="default: by the name, for - jsonl; text: only for -",
    )
    add(
        "--ordered",
        action="store_true",
        help="write results in the order of the rows; Ctrl-C loses those that wait for an earlier "
        "one",
    )
    add(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="I/N",
        help="every N-th row, starting with the I-th: one of N jobs, each with its own output",
    )
    add(
        "--retry-errors",
        action="store_true",
        help="recompute rows whose result in the output is an error",
    )
    add(
        "--recompute-changed",
        action="store_true",
        help="recompute rows that have changed under the same custom_id since their result in the "
        "output",
    )
    add("--chat", action="store_true", help="prompts are messages of a user, not texts to continue")
    add("--chat-template", metavar="FILE", help="a Jinja template, in place of the checkpoint's")
    add(
        "--chat-template-kwargs",
        type=object_value,
        default={},
        metavar="JSON",
        help='variables of the template, such as {"enable_thinking": false}',
    )
    add_engine_options(parser)
    add_sampling_options(parser)


@dataclass(frozen=True)
class _Call:
    """A checked call of this command.

    Attributes:
        config: options of the engine, checked.
        options: options of the engine as given, for `LLM(config.model, ...)`.
        params: sampling parameters of rows that have none.
        chat: arguments of `nanovllm.batch.run` about chats.
        rows: rows of the input.
        is_piped: whether the input is standard input.
        read_again: function that reads the input once more; None: it can be read only once.
        recomputes: whether changed rows are computed again instead of refused.
        ordered: whether results are wanted in the order of the rows.
        sink: output.
    """

    config: Config
    options: dict[str, Any]
    params: SamplingParams
    chat: dict[str, Any]
    rows: Iterator[Row]
    is_piped: bool
    read_again: Callable[[], Iterator[Row]] | None
    recomputes: bool
    ordered: bool
    sink: ResumableSink | StreamSink


def run(args: argparse.Namespace) -> int:
    """Answer the rows.

    Returns:
        The exit code.

    Raises:
        TypeError, ValueError: for a mistake in the call.
    """
    if args.model is None:
        raise ValueError(
            "--model must be the directory of a checkpoint or its name on the hub, like "
            "Qwen/Qwen3-0.6B: unlike chat and bench, this command has no default"
        )
    try:
        kind = format_of(args.input, args.input_format, "input_format", INPUT_FORMATS)
        total = count_rows(args.input, kind, args.shard)
        call = _read_call(args, kind)
    except WRONG_NAMES as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        say(f"error: {error}")
        return FILE_FAILED
    report = Report(call.sink, total, None if args.output == STANDARD else args.output)
    try:
        with call.sink:
            code = _answer(call, report)
    except OSError as error:
        if args.output == STANDARD:  # else unwritten data would fail again as Python exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BY_SIGNAL + signal.SIGPIPE
        say(f"error: {error}")
        code = FILE_FAILED
    report.end(is_complete=code == ANSWERED)
    return SOME_ERRORS if code == ANSWERED and call.sink.num_errors else code


def _read_call(args: argparse.Namespace, kind: str) -> _Call:
    """Read the flags, and open the input and the output.

    Raises:
        TypeError, ValueError: for a mistake.
        OSError: for files that cannot be opened.
    """
    options = engine_options(args)
    config = Config(os.path.expanduser(args.model), **our_options(options))
    is_dummy = config.load_format == "dummy"
    directory = checkpoint_directory(config.model, config.revision, weights=not is_dummy)
    adapters = adapter_directories(config.adapters)
    config = replace(config, model=directory, revision=None, adapter=adapters)
    options.pop("revision", None)
    options["adapter"] = adapters
    params = default_params(config, sampling_options(args))
    if params.structured_outputs is not None:
        from nanovllm.sampling.structured_output import check_package

        try:
            check_package()
        except ImportError as error:  # every row would fail with it
            raise ValueError(str(error)) from None
    chat = {"chat": args.chat, "chat_template_kwargs": args.chat_template_kwargs}
    if args.chat_template is not None:
        with open(args.chat_template, encoding="utf-8") as file:
            chat["chat_template"] = file.read()
    read = partial(read_rows, args.input, kind, shard=args.shard)
    again = read if os.path.isfile(args.input) or os.path.isdir(args.input) else None
    if args.recompute_changed and (again is None or args.output == STANDARD):
        raise ValueError(
            "--recompute-changed reads the input twice, and needs an output that is a file: pass "
            f"--input FILE and --output FILE, got {args.input} and {args.output}"
        )
    if args.output != STANDARD:
        shard = "/".join(map(str, args.shard))
        job = describe_job(config, params, **chat, input_format=kind, shard=shard)
        sink: ResumableSink | StreamSink = ResumableSink(
            args.output, job, output_format=args.output_format, retry_errors=args.retry_errors
        )
    elif args.retry_errors:
        raise ValueError("--retry-errors needs an output that is a file: pass --output FILE")
    elif args.output_format == "parquet":
        raise ValueError("--output must be a directory for Parquet, got standard output")
    else:
        sink = StreamSink(sys.stdout.buffer, args.output_format or "jsonl")
    return _Call(
        config,
        options,
        params,
        chat,
        rows=read(),
        is_piped=args.input == STANDARD,
        read_again=again,
        recomputes=args.recompute_changed,
        ordered=args.ordered or args.output_format == "text",
        sink=sink,
    )


def _answer(call: _Call, report: Report) -> int:
    """Compute the rows that are not finished yet.

    Raises:
        OSError: if a result cannot be written.
        ValueError: for a row that has changed since its result, or images without Pillow.
    """
    _look_for_changes(call)
    left = call.sink.unfinished(call.rows)
    if (first := next(left, None)) is None:
        return ANSWERED  # without loading the model
    from nanovllm.llm import LLM

    left = chain([first], left)
    with ExitStack() as stack:
        try:
            llm = stack.enter_context(LLM(call.config.model, **call.options))
        except (TypeError, ValueError):
            raise
        except Exception:
            traceback.print_exc()
            return ENGINE_FAILED
        stop = stack.enter_context(_Stop())
        stack.enter_context(report)
        rows = _reading(left)

        def ends() -> bool:  # called between two steps
            with _files():
                call.sink.tick()
            return stop.signum is not None

        results = run_job(
            llm,
            Ahead(rows) if call.is_piped else rows,
            call.params,
            **call.chat,
            ordered=call.ordered,
            stop=ends,
        )
        stack.enter_context(closing(results))
        try:
            for result in results:
                with _files():
                    call.sink.write(result)
                report.add(result)
        except _FileError as failure:
            raise failure.error from None
        except NoPillowError as error:
            raise ValueError(str(error)) from None
        except Exception:
            traceback.print_exc()
            return ENGINE_FAILED
        return ANSWERED if stop.signum is None else BY_SIGNAL + stop.signum


def _look_for_changes(call: _Call) -> None:
    """Compare rows with those of finished results, before anything is computed. Rows that can be
    read only once are compared as they come.

    Raises:
        OSError, ValueError: as `ResumableSink.check` and `drop_changed`.
    """
    sink = call.sink
    if call.read_again is None or not isinstance(sink, ResumableSink) or not sink.num_finished:
        return
    if not call.recomputes:
        sink.check(call.read_again())
    elif count := sink.drop_changed(call.read_again()):
        say(f"changed rows, computed again: {count:,}")


class _FileError(Exception):
    """An error of input or output, not of the engine; `error` is the cause."""

    def __init__(self, error: OSError) -> None:
        self.error = error


@contextmanager
def _files() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _FileError(error) from error


def _reading(rows: Iterator[Row]) -> Iterator[Row]:
    with _files():
        try:
            yield from rows
        except ValueError as error:  # a row that has changed, in a pipe
            raise OSError(str(error)) from None


class _Stop:
    """Ctrl-C and SIGTERM end the job after the step in progress; a second one, at once."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum

    def __enter__(self) -> "_Stop":
        signums = (signal.SIGINT, signal.SIGTERM)
        # A shell makes background jobs ignore Ctrl-C.
        heeded = [signum for signum in signums if signal.getsignal(signum) is not signal.SIG_IGN]
        self._old = {signum: signal.signal(signum, self._handle) for signum in heeded}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with I in 1..N, got {text!r}")
    return int(match[1]), int(match[2])
