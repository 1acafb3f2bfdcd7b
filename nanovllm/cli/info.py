"""Report the installation, and the devices that it can run on here; or the size of a model.

Versions, devices with their memory, the attention backends of each and the reason why any cannot
run, and the extras with the command that installs them. For a report of a problem: --json.

With --model, instead: whether a checkpoint runs, its layers and parameters, and the memory of its
weights and of a sequence. It is not loaded.
"""

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from nanovllm import __version__

if TYPE_CHECKING:
    import torch

GIB = 2**30
HEAD_DIM, BLOCK_SIZE = 128, 256  # sizes of the model for which backends are checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("--model", help="directory of a checkpoint, or its name on the hub")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    if args.model is not None:
        model = collect_model(args.model)
        print(json.dumps(model) if args.json else describe_model(model))
        return 0
    found = collect()
    print(json.dumps(found) if args.json else describe(found))
    return 0


def collect() -> dict[str, Any]:
    """All facts, in JSON's types; memory in bytes, None for missing ones."""
    own = [Requirement(text) for text in _requirements()]
    return {
        "nanovllm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {each.name: _version(each.name) for each in own if not _extra(each)},
        "devices": _devices(),
        "no_cuda": _no_cuda(),
        "extras": _extras(own),
    }


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("nanovllm") or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone, without an install
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra(requirement: Requirement) -> str | None:
    """The extra that a requirement belongs to; None: it is always required."""
    _, is_of_one, rest = str(requirement.marker or "").partition('extra == "')
    return rest.partition('"')[0] if is_of_one else None


def _extras(requirements: list[Requirement]) -> dict[str, dict[str, Any]]:
    extras: dict[str, dict[str, Any]] = {}
    for each in requirements:
        if (extra := _extra(each)) is None:
            continue
        entry = extras.setdefault(extra, {"installed": True, "packages": {}, "install": ""})
        version = entry["packages"][each.name] = _version(each.name)
        if version is None or not each.specifier.contains(version, prereleases=True):
            entry["installed"] = False
        each.marker = None
        entry["install"] = f'{entry["install"] or "pip install"} "{each}"'
    return extras


def _devices() -> list[dict[str, Any]]:
    import torch

    from nanovllm.sizing.memory import available_cpu_memory
    from nanovllm.utils.device import capability, hardware_name

    is_linux = hasattr(os, "sched_getaffinity")
    cpu = torch.device("cpu")
    devices: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": hardware_name("cpu"),
            "cores": len(os.sched_getaffinity(0)) if is_linux else os.cpu_count(),
            "total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "free_bytes": available_cpu_memory(),
            "attention": _attention(cpu, torch.float32),
        }
    ]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", i)
        free, total = torch.cuda.mem_get_info(device)
        entry = {
            "device": str(device),
            "name": hardware_name(str(device)),
            "compute_capability": ".".join(map(str, capability(i))),
            "total_bytes": total,
            "free_bytes": free,
            "attention": _attention(device, torch.bfloat16),
        }
        devices.append(entry)
    return devices


def _attention(device: "torch.device", dtype: "torch.dtype") -> dict[str, str | None]:
    """The reason why each backend cannot run on a device; None if it can."""
    from nanovllm.attention import BACKENDS, AttentionNeeds

    needs = AttentionNeeds(device, dtype, HEAD_DIM, BLOCK_SIZE)
    return {backend.name: backend.refusal(needs) for backend in BACKENDS}


def _no_cuda() -> str | None:
    """The reason why there are no CUDA devices; None if there are."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return "this build of PyTorch is for CPUs only"
    return f"PyTorch {torch.__version__} finds no GPU, or no driver for it"


def describe(found: dict[str, Any]) -> str:
    """The facts as text."""
    packages = (f"{name} {version or '(missing)'}" for name, version in found["packages"].items())
    lines = [
        f"nanovllm {found['nanovllm']}, Python {found['python']}, {found['platform']}",
        ", ".join(packages),
    ]
    for device in found["devices"]:
        facts = [device["name"]]
        if "cores" in device:
            facts.append(f"{device['cores']} cores")
        else:
            facts.append(f"compute capability {device['compute_capability']}")
        total, free = (device[f"{kind}_bytes"] / GIB for kind in ("total", "free"))
        facts.append(f"{total:.1f} GiB, {free:.1f} free")
        lines.append(f"\n{device['device']}: {', '.join(facts)}")
        for name, refusal in device["attention"].items():
            lines.append(f"  attention {name}: {'no: ' + refusal if refusal else 'yes'}")
    if found["no_cuda"]:
        lines.append(f"no CUDA device: {found['no_cuda']}")
    lines.append("\nextras:")
    for name, extra in found["extras"].items():
        lines.append(f"  {name}: {'installed' if extra['installed'] else extra['install']}")
    return "\n".join(lines)


def collect_model(name: str) -> dict[str, Any]:
    """The facts of a model, in JSON's types; sizes in bytes.

    Raises:
        ValueError: if the engine does not run it.
    """
    from nanovllm.benchmark.limits import itemsizes
    from nanovllm.checkpoint.hub import checkpoint_directory
    from nanovllm.checkpoint.model_config import ModelConfig
    from nanovllm.checkpoint.quantization import format_of
    from nanovllm.sizing.model_size import model_size, states

    config = ModelConfig.from_pretrained(checkpoint_directory(name, None, weights=False))
    itemsize = 4 if config.dtype == "float32" else 2
    held = "mxfp4" if config.is_mxfp4 else format_of(config.quantization)
    sizes, matrices = itemsizes(config, itemsize, "auto", held), model_size(config)
    attending = [layer for layer in config.layers if layer.rope is not None]
    embedding = 0 if config.tie_word_embeddings else matrices.head
    linear, plain = matrices.linear, matrices.plain
    quantised, others = linear.dense + linear.sparse, plain.dense + plain.sparse + embedding
    weights = sizes.linear * quantised + sizes.plain * others + sizes.head * matrices.head
    return {
        "architecture": config.architecture,
        "dtype": config.dtype,
        "quantization": held,
        "max_model_len": config.max_position_embeddings,
        "layers": {
            "attention": sum(not layer.window for layer in attending),
            "sliding attention": sum(bool(layer.window) for layer in attending),
            "state": len(config.layers) - len(attending),
            "with experts": sum(layer.is_sparse for layer in config.layers),
        },
        "parameters": quantised + others + matrices.head,
        "parameters_of_a_token": round(matrices.of_token) + matrices.head,
        "weights_bytes": round(weights),
        "kv_bytes_of_a_token": round(
            2 * config.num_key_value_heads * config.head_dim * sizes.kv * len(attending)
        ),
        "state_bytes_of_a_sequence": states(config, itemsize).num_bytes,
    }


def describe_model(found: dict[str, Any]) -> str:
    """The facts of a model as text."""
    layers = ", ".join(f"{count} {kind}" for kind, count in found["layers"].items() if count)
    parameters, active = (
        _rounded(found[key], {"billion": 1e9, "million": 1e6})
        for key in ("parameters", "parameters_of_a_token")
    )
    units = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
    weights, kv, states = (
        _rounded(found[key], units)
        for key in ("weights_bytes", "kv_bytes_of_a_token", "state_bytes_of_a_sequence")
    )
    format = "" if found["quantization"] == "none" else f", {found['quantization']}"
    lines = [
        f"{found['architecture']}: {found['dtype']}{format}, up to {found['max_model_len']} tokens",
        f"  layers: {layers}",
        f"  parameters: {parameters}, multiplied for a token: {active}",
        f"  weights: {weights}",
        f"  KV cache: {kv} a token",
    ]
    if found["state_bytes_of_a_sequence"]:
        lines.append(f"  states: {states} a sequence")
    return "\n".join(lines)


def _rounded(number: float, units: Mapping[str, float]) -> str:
    """A number in the largest unit that it reaches, or in the smallest."""
    *_, least = units
    unit = next((unit for unit, size in units.items() if number >= size), least)
    return f"{number / units[unit]:.4g} {unit}"
