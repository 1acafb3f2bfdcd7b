"""The directory of a checkpoint that is given by its name on the Hugging Face hub.

`huggingface_hub` finds it in its cache, or downloads it with a progress bar; `HF_HOME`, `HF_TOKEN`,
`HF_ENDPOINT` and `HF_HUB_OFFLINE` have their usual meaning. Imports no torch.
"""

import os
import re
from pathlib import Path

from nanovllm.checkpoint.files import INDEX, has_file, read_json
from nanovllm.checkpoint.tokenizer import TOKENIZER_FILES

NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9]\w*[\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
SNAPSHOT = re.compile(r".*/models--(?:.*--)?([^/]+)/snapshots/[^/]+")  # in the hub's cache
WEIGHTS = "*.safetensors"
WANTED = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
NOT_WANTED = ["*/*", "consolidated*"]  # the same weights in other forms


def checkpoint_directory(model: str, revision: str | None, *, weights: bool = True) -> str:
    """The directory with a checkpoint's files: `model` itself, or one in the cache of the hub.

    Args:
        model: directory, or name on the hub, "owner/name".
        revision: branch, tag or commit on the hub; None: its main branch.
        weights: whether the weights are needed, too.

    Raises:
        ValueError: if `model` is neither or cannot be fetched; the message has a remedy.
    """
    if os.path.isdir(model):
        if revision is not None:
            raise ValueError(
                f"`revision` is for names on the hub, and {model!r} is a directory: leave it out"
            )
        return model
    if model.endswith(".gguf"):
        raise ValueError(
            f"`model` {model!r} is a GGUF file, which is not supported: pass the original "
            "checkpoint in safetensors"
        )
    if not NAME.fullmatch(model) or os.path.lexists(model):
        raise ValueError(
            "`model` must be the directory of a checkpoint or a name on the hub like "
            f"Qwen/Qwen3-0.6B, and {model!r} is neither"
        )
    return _cached(model, revision, weights) or _download(model, revision, weights)


def checkpoint_name(directory: str) -> str:
    """The usual name of a checkpoint: that of its directory, or, in the hub's cache, its name on
    the hub without the owner.
    """
    path = Path(os.path.abspath(directory)).as_posix()
    found = SNAPSHOT.fullmatch(path)
    return found[1] if found else path.rpartition("/")[2]


def _cached(name: str, revision: str | None, weights: bool) -> str | None:
    """The newest snapshot in the cache, if it is complete. The hub is not asked for a newer one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name,
            revision=revision,
            local_files_only=True,
            allow_patterns=_wanted(weights),
            ignore_patterns=NOT_WANTED,
        )
    except LocalEntryNotFoundError:
        return None
    return found if _is_whole(Path(found), weights) else None


def _wanted(weights: bool) -> list[str]:
    return [*WANTED, WEIGHTS] if weights else WANTED


def _is_whole(directory: Path, weights: bool) -> bool:
    """Whether a snapshot has configuration, tokenizer and weights; downloads may break off."""
    if not has_file(directory / "config.json") or not any(
        has_file(directory / name) for name in TOKENIZER_FILES
    ):
        return False
    if not weights:
        return True
    if not has_file(directory / INDEX):
        names = [path.name for path in directory.glob(WEIGHTS)]
        return bool(names) and not any("-of-" in name for name in names)
    files = read_json(directory / INDEX).get("weight_map")
    return isinstance(files, dict) and all(
        has_file(directory / str(file)) for file in set(files.values())
    )


def _download(name: str, revision: str | None, weights: bool) -> str:
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
            name, revision=revision, allow_patterns=_wanted(weights), ignore_patterns=NOT_WANTED
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
        remedy = "try again, or pass the directory of a checkpoint"
        if constants.HF_HUB_OFFLINE:
            reason = f"it is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
            remedy = "unset it, or pass the directory of a checkpoint"
    # Outside the block: inside it, some sixty lines of the hub library's frames would come first.
    raise ValueError(f"`model` {name!r} is not available: {reason}; {remedy}")
