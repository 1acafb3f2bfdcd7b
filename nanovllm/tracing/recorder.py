"""`Recorder`: the file that an engine records to, if any, from its opening to its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.hub import checkpoint_name
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.tracing.trace_file import TraceFile
from nanovllm.utils.device import hardware_name

if TYPE_CHECKING:
    from nanovllm.engine.core import Core

DEFAULT_PATH = "trace.json"


class Recorder:
    """The recorder of one engine. It outlives the engine's owner, so it holds no engine and no
    requests.
    """

    def __init__(self) -> None:
        self._file: TraceFile | None = None
        self._stop: Callable[[], None] | None = None
        self._opened_at = 0.0

    def open(self, path: str | Path) -> None:
        """Open the file.

        Raises:
            RuntimeError: if there is one already.
            TypeError, ValueError: if it is not a path, or the path of a file that must not be
                overwritten.
        """
        if self._file is not None:
            raise RuntimeError(
                f"this engine is recording to {self._file.path!r}: it can record to one file at a "
                "time"
            )
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"`path` must be the path of a file, got {path!r}")
        self._opened_at = time.perf_counter()
        self._file = TraceFile(os.fspath(path))

    def start(self, core: Core[Any], facts: Callable[[], dict[str, Any]]) -> None:
        """Record to the file, if it is open. `facts`: see `engine_facts`."""
        if self._file is not None:
            seconds = round(time.perf_counter() - self._opened_at, 3)
            self._stop = core.record(self._file.write, {**facts(), "startup_seconds": seconds})

    def stop(self) -> None:
        """Write the rest, and close the file. May be called again."""
        file, stop, self._file, self._stop = self._file, self._stop, None, None
        try:
            if stop is not None:
                stop()
        finally:
            if file is not None:
                file.end()


def engine_facts(
    config: Config, model_config: ModelConfig, description: dict[str, Any]
) -> dict[str, Any]:
    """The facts about an engine that a reader of a trace needs: options that took effect, other
    options, the model's shape. Names no directory.
    """
    options = ("max_num_batched_tokens", "kvcache_block_size", "mixed_steps")
    on_gpu = str(description["device"]).startswith("cuda")
    windows = {layer.window for layer in model_config.layers if layer.window}
    return {
        "model": checkpoint_name(config.model),
        "architecture": model_config.architecture,
        **description,
        "device_name": hardware_name(description["device"]) if on_gpu else "CPU",
        **{name: getattr(config, name) for name in (*options, "enable_prefix_caching")},
        "asked_num_seqs": config.max_num_seqs,
        "data_parallel_size": config.data_parallel_size,
        "windows": sorted(windows),
        "config": model_config.source,
        "pid": os.getpid(),
        "wall_clock": time.time(),
    }
