"""The identity of a job: all that its results depend on, beside its rows. Imports no torch."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from nanovllm.checkpoint.files import ADAPTER, ADAPTER_WEIGHTS
from nanovllm.checkpoint.generation_config import read_sampling_params
from nanovllm.checkpoint.hub import WANTED, checkpoint_name
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams

# Options that change results. Others change where and how fast the same is computed, and may differ
# between two runs of a job: a machine with other GPUs may continue it.
OPTIONS = (
    *("dtype", "quantization", "kv_cache_dtype", "seed", "max_model_len", "load_format"),
    *("generation_config", "logprobs_mode", "mm_processor_kwargs", "language_model_only"),
)
SAMPLES, SAMPLE_BYTES = 64, 4096  # samples of each file of weights, and the size of one


def default_params(config: Config, given: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of rows that have none: `given`, over those of the checkpoint.

    Raises:
        TypeError, ValueError: naming the parameter that is wrong.
    """
    is_plain = config.generation_config == "vllm"
    own = SamplingParams() if is_plain else read_sampling_params(config.model)
    return dataclasses.replace(own, **given)


def describe_job(config: Config, params: SamplingParams, **more: Any) -> dict[str, Any]:
    """Describe a job in JSON's types, for `ResumableSink`.

    Args:
        config: options of the engine; `model` and `adapter` are directories.
        params: sampling parameters of rows that have none.
        more: other values that must be the same when the job is continued, such as the shard.
    """
    options = {name: getattr(config, name) for name in OPTIONS}
    model = describe_model(Path(config.model))
    job = {"model": model, "engine": options, "sampling": _plain(params), **more}
    if config.adapters:
        job["adapter"] = [describe_adapter(Path(directory)) for directory in config.adapters]
    return json.loads(json.dumps(job))


def describe_model(directory: Path) -> dict[str, str]:
    """Hashes of a checkpoint's files, which identify it in any directory.

    For weights, the size and 64 samples of 4 KiB of each file are read, not gigabytes: two
    checkpoints that differ only in few other places count as one.
    """
    groups = {"config.json": "config", "generation_config.json": "generation config"}
    hashes: dict[str, Any] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix == ".safetensors":
            group = "weights"
        elif any(path.match(pattern) for pattern in WANTED):
            group = groups.get(path.name, "tokenizer")
        else:
            continue
        state = hashes.setdefault(group, xxh3_128())
        state.update(path.name.encode(errors="surrogateescape"))
        for piece in _pieces(path) if group == "weights" else [path.read_bytes()]:
            state.update(piece)
    return {group: state.hexdigest() for group, state in hashes.items()}


def describe_adapter(directory: Path) -> str:
    """A hash of an adapter's files, which identifies it in any directory, as `describe_model`; and
    after a space, for messages, its name.
    """
    state = xxh3_128((directory / ADAPTER).read_bytes())
    for piece in _pieces(directory / ADAPTER_WEIGHTS):
        state.update(piece)
    return f"{state.hexdigest()} {checkpoint_name(str(directory))}"


def _pieces(path: Path) -> Iterator[bytes]:
    """The size of a large file, and samples of its contents."""
    size = path.stat().st_size
    yield b"%d" % size
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def with_defaults(old: Any, new: Any) -> Any:
    """An older job's description with the options and parameters of `new` that it lacks: its
    version had none, and did what their defaults do.
    """
    defaults = {
        "engine": {name: getattr(Config, name) for name in OPTIONS},
        "sampling": json.loads(json.dumps(_plain(SamplingParams()))),
    }
    filled = dict(old) if isinstance(old, dict) and isinstance(new, dict) else old
    for group, values in defaults.items() if filled is not old else ():
        given, wanted = old.get(group), new.get(group)
        if isinstance(given, dict) and isinstance(wanted, dict):
            later = {name: value for name, value in values.items() if name in wanted}
            filled[group] = {**later, **given}
    return filled


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """The differences of two descriptions, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new and not (name == "adapter" and _hashes(old) == _hashes(new)):
        yield f"{name} was {json.dumps(old)} and is {json.dumps(new)}"


def _hashes(adapters: list[str] | None) -> list[str]:
    """The hashes of `describe_adapter`, which older jobs have without names."""
    return [str(each).partition(" ")[0] for each in adapters or ()]


def _plain(params: SamplingParams) -> dict[str, Any]:
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    form = params.structured_outputs
    return {**values, "structured_outputs": form and dataclasses.asdict(form)}
