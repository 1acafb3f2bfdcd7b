"""The entry of the command line: reads the arguments, runs a command, and ends in an exit code.

A command is a module with a docstring, `add_arguments(parser)` and `run(args) -> int`. It imports
torch when it runs, not before, so that `--help` answers at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from nanovllm import __version__
from nanovllm.cli import bench, chat, compile, generate, info, report, serve

COMMANDS: dict[str, ModuleType] = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "bench": bench,
    "compile": compile,
    "report": report,
    "info": info,
}  # in the order of --help
OPERANDS = {"serve": " [MODEL]", "report": " TRACE"}  # of commands that have one, for their usage
USAGE_ERROR, INTERRUPTED = 2, 130  # exit codes; the latter is a shell's for Ctrl-C


class Parser(argparse.ArgumentParser):
    """Parser that prints a mistake in one line: the usage of a command has dozens."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments; None for those of the process.

    Returns:
        The exit code: the command's own; 2 for a mistake of the user, with one line on standard
        error; 130 after Ctrl-C; 1 if the reader of standard output has gone.

    Raises:
        SystemExit: after `--help` and `--version`, and if the arguments cannot be read.
    """
    parser, commands = _parsers()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("nanovllm").setLevel(level)
    try:
        return COMMANDS[args.command].run(args)
    except (TypeError, ValueError) as error:  # the library's errors for mistakes of the caller
        print(f"nanovllm {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's exit fails
        return 1


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and those of the commands by name."""
    parser = Parser(prog="nanovllm", description="Offline LLM inference.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    parsers: dict[str, Parser] = {}
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, help="see `COMMAND --help`"
    )
    for name, module in COMMANDS.items():
        summary, _, details = (module.__doc__ or "").partition("\n\n")
        command = parsers[name] = commands.add_parser(
            name,
            usage=f"nanovllm {name} [options]{OPERANDS.get(name, '')}",
            help=summary.rstrip("."),
            description=f"{summary}\n\n{details}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument(
            "-v", "--verbose", action="store_true", help="log what the engine does at its start"
        )
    return parser, parsers
