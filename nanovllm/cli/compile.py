"""Compile the kernels of a model ahead, into Triton's cache: for container images and job arrays.

Loads no weights. For the GPU that is here, or for another one by --capability, also where none is.
The engine's options decide what is compiled: give those that the engine will have. The cache is the
directory TRITON_CACHE_DIR, or ~/.triton/cache; it serves the same version of Triton.
"""

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.cli.options import add_engine_options, engine_options

if TYPE_CHECKING:
    from nanovllm.engine.stand_in import Card

MIB = 2**20

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument(
        "--model", required=True, help="directory of a checkpoint, or its name on the hub"
    )
    parser.add_argument(
        "--capability",
        metavar="X.Y",
        help="compute capability of the GPU to compile for, such as 9.0 for H100 and H200, or an "
        "architecture of AMD's, such as gfx942 (default: the GPU that is here)",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, and say what is where. 1 if a kernel could not be compiled."""
    options = engine_options(args)
    if str(options.get("device")) == "cpu":
        raise ValueError(
            "`--device` must be cuda or auto, got 'cpu': a CPU has no kernels to compile"
        )
    card = find_card(args.capability)
    from triton import knobs

    from nanovllm.compiling.server import launcher_of, needs_launchers
    from nanovllm.engine.stand_in import compile_kernels, put_in

    cache = Path(knobs.cache.dir)
    check_writable(cache)
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
            "What launches them is not: this version of Triton links it with NVIDIA's driver, "
            "libcuda.so.1, which is not here (TRITON_LIBCUDA_PATH names a directory that has it). "
            "The first start does, in a third of a second for each kind of arguments."
        )
    for reason in dict.fromkeys(failed.values()):
        names = sorted(job.function for job, why in failed.items() if why == reason)
        logger.error("%s: %s", ", ".join(names), reason)
    return int(bool(failed))


def check_writable(cache: Path) -> None:
    """ValueError if nothing can be written to Triton's cache, which may have to be made."""
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ValueError(
            f"Triton's cache {cache} cannot be written: have TRITON_CACHE_DIR name a directory "
            "that can"
        )


def find_card(capability: str | None) -> "Card":
    """The GPU that --capability names, or that is here. ValueError if there is none."""
    import torch

    from nanovllm.engine.stand_in import CARDS, card_here

    runs = {name: card for name, card in CARDS.items() if card.runs_kernels}
    if capability is not None:
        capability = f"{capability}.0" if capability.isdecimal() else capability
        if capability not in runs:
            raise ValueError(
                f"`--capability` must be one of {', '.join(runs)}, the GPUs that are known, "
                f"got {capability!r}"
            )
        return runs[capability]
    if not torch.cuda.is_available():
        raise ValueError(
            "`--capability` must be given where no GPU is: 9.0 for H100 and H200, 8.0 for A100"
        )
    return card_here()
