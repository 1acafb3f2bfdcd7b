"""Compile the kernels of a model ahead, into Triton's cache: for container images and job arrays.

Loads no weights. Compiles for this machine's GPU, or with --capability for another one, also where
there is no GPU. The engine's options decide which kernels are compiled: give those that the engine
will have. The cache is the directory TRITON_CACHE_DIR, or ~/.triton/cache; it serves the same
version of Triton.
"""

import argparse
import logging
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.cli.options import add_engine_options, engine_options

if TYPE_CHECKING:
    from nanovllm.cli.stand_in import Card

MIB = 2**20

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "--model", required=True, help="directory of a checkpoint, or its name on the hub"
    )
    parser.add_argument(
        "--capability",
        metavar="X.Y",
        help="compute capability of the GPU to compile for, such as 9.0 for H100 and H200, or an "
        "AMD architecture, such as gfx942 (default: this machine's GPU)",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, and print a summary. Returns 1 if a kernel could not be compiled, else 0."""
    options = engine_options(args)
    if str(options.get("device")) == "cpu":
        raise ValueError(
            "`--device` must be cuda or auto, got 'cpu': a CPU has no kernels to compile"
        )
    if find_spec("triton") is None:
        raise ValueError("Triton, which compiles the kernels, is not installed")
    card = find_card(args.capability)
    from triton import knobs

    from nanovllm.cli.stand_in import compile_kernels, put_in
    from nanovllm.compiling.server import launcher_of, needs_launchers

    check_writable(knobs.cache.dir)
    cache = Path(knobs.cache.dir)
    links = launcher_of(card.target) is not None
    put_in(card)
    compilers = compile_kernels(args.model, card, options)
    kernels = {job for compiler in compilers for job in compiler.rehearsed}
    failed = {job: why for compiler in compilers for job, why in compiler.failed.items()}
    num_new = sum(compiler.num_compiled for compiler in compilers)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    print(
        f"{len(kernels) - len(failed)} of {len(kernels)} kernels are compiled for {card.name}, "
        f"{num_new} of them now.\n{cache} has {size / MIB:.0f} MiB."
    )
    if needs_launchers(card.target) and not links:
        print(
            "Their launchers are not: this version of Triton links them with NVIDIA's driver, "
            "libcuda.so.1, which is missing here (set TRITON_LIBCUDA_PATH to its directory). The "
            "first start links them, in a third of a second per signature."
        )
    for reason in dict.fromkeys(failed.values()):
        names = [job.function for job, why in failed.items() if why == reason]
        logger.error("%d kernels (%s): %s", len(names), ", ".join(sorted({*names})), reason)
    return int(bool(failed))


def check_writable(cache: str) -> None:
    """ValueError if Triton's cache cannot be written. Makes its directory if there is none."""
    try:
        os.makedirs(cache, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        raise ValueError(
            f"Triton's cache {cache!r} cannot be written ({error.strerror}): set TRITON_CACHE_DIR "
            "to a writable directory"
        ) from None


def find_card(capability: str | None) -> "Card":
    """The GPU that --capability names, or this machine's. ValueError if there is none."""
    import torch

    from nanovllm.cli.stand_in import CARDS, card_here

    runs = {name: card for name, card in CARDS.items() if card.runs_kernels}
    if capability is not None:
        name = f"{capability}.0" if capability.isdecimal() else capability
        if name not in runs:
            raise ValueError(
                f"`--capability` must be one of {', '.join(runs)}, the known GPUs, "
                f"got {capability!r}"
            )
        return runs[name]
    if not torch.cuda.is_available():
        raise ValueError(
            "`--capability` must be given where there is no GPU: 9.0 for H100 and H200, 8.0 for "
            "A100"
        )
    return card_here()
