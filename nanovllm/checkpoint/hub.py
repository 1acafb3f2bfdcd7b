"""The directory of a checkpoint or an adapter that is given by its name on the Hugging Face hub.

`huggingface_hub` finds it in its cache, or downloads it with a progress bar; `HF_HOME`, `HF_TOKEN`,
`HF_ENDPOINT` and `HF_HUB_OFFLINE` have their usual meaning. Imports no torch.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from nanovllm.checkpoint.files import ADAPTER, ADAPTER_WEIGHTS, INDEX, has_file, read_json
from nanovllm.checkpoint.tokenizer import TOKENIZER_FILES

NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9]\w*[\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
SNAPSHOT = re.compile(r".*/models--(?:.*--)?([^/]+)/snapshots/[^/]+")  # in the hub's cache
WEIGHTS = "*.safetensors"
WANTED = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
NOT_WANTED = ["*/*", "consolidated*"]  # the same weights in other forms


class Repository(NamedTuple):
    """A kind of repository on the hub.

    Attributes:
        option: option that names one.
        holds: name of what it holds, in messages.
        wanted: patterns of the files that are needed.
        is_whole: function that tells whether a snapshot has them all; downloads may break off.
    """

    option: str
    holds: str
    wanted: list[str]
    is_whole: Callable[[Path], bool]


def _has_all(directory: Path, names: Iterable[str]) -> bool:
    return all(has_file(directory / name) for name in names)


def _has_facts(directory: Path) -> bool:
    """Whether a snapshot has configuration and tokenizer."""
    return has_file(directory / "config.json") and any(
        has_file(directory / name) for name in TOKENIZER_FILES
    )


def _has_model(directory: Path) -> bool:
    """Whether a snapshot has configuration, tokenizer and weights."""
    if not _has_facts(directory):
        return False
    if not has_file(directory / INDEX):
        names = [path.name for path in directory.glob(WEIGHTS)]
        return bool(names) and not any("-of-" in name for name in names)
    files = read_json(directory / INDEX).get("weight_map")
    return isinstance(files, dict) and _has_all(directory, {str(file) for file in files.values()})


MODEL = Repository("model", "checkpoint", [*WANTED, WEIGHTS], _has_model)
FACTS = MODEL._replace(wanted=WANTED, is_whole=_has_facts)
PEFT_FILES = [ADAPTER, ADAPTER_WEIGHTS]
PEFT = Repository(
    "adapter", "PEFT adapter", PEFT_FILES, lambda directory: _has_all(directory, PEFT_FILES)
)


def checkpoint_directory(model: str, revision: str | None, *, weights: bool = True) -> str:
    """The directory with a checkpoint's files: `model` itself, or one in the cache of the hub.

    Args:
        model: directory, or name on the hub, "owner/name".
        revision: branch, tag or commit on the hub; None: its main branch.
        weights: whether the weights are needed, too.

    Returns:
        An absolute path: the working directory may change.

    Raises:
        ValueError: if `model` is neither or cannot be fetched; the message has a remedy.
    """
    if os.path.isdir(model):
        if revision is not None:
            raise ValueError(
                f"`revision` is for names on the hub, and {model!r} is a directory: leave it out"
            )
        return os.path.abspath(model)
    if model.endswith(".gguf"):
        raise ValueError(
            f"`model` {model!r} is a GGUF file, which is not supported: pass the original "
            "checkpoint in safetensors"
        )
    if not _is_name(model):
        raise ValueError(
            "`model` must be the directory of a checkpoint or a name on the hub like "
            f"Qwen/Qwen3-0.6B, and {model!r} is neither"
        )
    kind = MODEL if weights else FACTS
    return _cached(model, revision, kind) or _download(model, revision, kind)


def adapter_directory(adapter: str) -> str:
    """The directory with a PEFT adapter's files: `adapter` itself, or one in the cache of the hub.

    Returns:
        An absolute path.

    Raises:
        ValueError: if `adapter` is neither or cannot be fetched; the message has a remedy.
    """
    adapter = os.path.expanduser(adapter)
    if os.path.isdir(adapter):
        return os.path.abspath(adapter)
    if not _is_name(adapter):
        raise ValueError(
            "`adapter` must be the directory of a PEFT adapter or a name on the hub like "
            f"owner/name, and {adapter!r} is neither"
        )
    return _cached(adapter, None, PEFT) or _download(adapter, None, PEFT)


def _is_name(path: str) -> bool:
    """Whether a path may be a name on the hub, and is nothing here."""
    return NAME.fullmatch(path) is not None and not os.path.lexists(path)


def checkpoint_name(directory: str) -> str:
    """The usual name of a checkpoint: that of its directory, or, in the hub's cache, its name on
    the hub without the owner.
    """
    path = Path(os.path.abspath(directory)).as_posix()
    found = SNAPSHOT.fullmatch(path)
    return found[1] if found else path.rpartition("/")[2]


def _cached(name: str, revision: str | None, kind: Repository) -> str | None:
    """The newest snapshot in the cache, if it is complete. The hub is not asked for a newer one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name,
            revision=revision,
            local_files_only=True,
            allow_patterns=kind.wanted,
            ignore_patterns=NOT_WANTED,
        )
    except LocalEntryNotFoundError:
        return None
    return found if kind.is_whole(Path(found)) else None


def _download(name: str, revision: str | None, kind: Repository) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{name}"
    try:
        return snapshot_download(
            name, revision=revision, allow_patterns=kind.wanted, ignore_patterns=NOT_WANTED
        )
    except GatedRepoError:
        reason, remedy = "it is gated", f"accept its terms on {page}, and set"
        remedy += " HF_TOKEN to a token of yours"
    except RepositoryNotFoundError:
        reason = "the hub has no such repository, or it is private"
        remedy = "correct the name, or set HF_TOKEN to a token with access to it"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
        remedy = f"see {page} for its revisions"
    except (OSError, HTTPError) as error:  # from the hub, the network or the disk
        reason = str(error).partition("\n")[0].removeprefix("Got: ") or type(error).__name__
        remedy = f"try again, or pass the directory of a {kind.holds}"
        if constants.HF_HUB_OFFLINE:
            reason = f"it is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
            remedy = f"unset it, or pass the directory of a {kind.holds}"
    # Outside the block: inside it, some sixty lines of the hub library's frames would come first.
    raise ValueError(f"`{kind.option}` {name!r} is not available: {reason}; {remedy}")
