"""The checkpoint's tokenizer, loaded through transformers. No code of the checkpoint is run."""

import logging
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from nanovllm.checkpoint.files import has_file, read_json

logger = logging.getLogger(__name__)

_importing = threading.Lock()  # two threads importing at once may see half of transformers

WHOLE = "tokenizer.json"  # all of a fast tokenizer
CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (WHOLE, CONFIG, "tokenizer.model", "vocab.json")
SLOW = 2  # seconds
FAST = "5.24"  # version of transformers; older ones need ten seconds (docs/experiments.md, 51)
TEMPLATE = "chat_template.jinja"
FILES_BESIDE = ("merges.txt", "added_tokens.json", "special_tokens_map.json", TEMPLATE)


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model directory, None if it has no tokenizer files.

    Raises:
        ValueError: if it cannot be loaded, or only by Python code in the checkpoint.
    """
    files = {name for name in (*TOKENIZER_FILES, *FILES_BESIDE) if has_file(Path(model) / name)}
    if files.isdisjoint(TOKENIZER_FILES):
        logger.warning(
            "%s has no tokenizer: prompts must be token ids, outputs have no text", model
        )
        return None
    own_code = CONFIG in files and bool(read_json(Path(model) / CONFIG).get("auto_map"))
    if own_code and WHOLE not in files:
        raise ValueError(
            f"the tokenizer of {model} is Python code (`auto_map` in its {CONFIG}), and code from "
            "a checkpoint is never run (there is no `trust_remote_code`): add a "
            f"{WHOLE}, or remove the tokenizer's files and pass prompts as token ids"
        )
    with _importing:
        begin = time.perf_counter()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        _log_import(time.perf_counter() - begin)
    kind = PreTrainedTokenizerFast if own_code else AutoTokenizer
    try:
        return kind.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # anything that the files provoke in transformers or tokenizers
        raise ValueError(
            f"the tokenizer of {model} cannot be loaded ({type(error).__name__}: {error}): "
            "are its files complete?"
        ) from None


def _log_import(seconds: float) -> None:
    """Log that an import was slow, and the version that makes it fast."""
    if seconds > SLOW:
        installed = version("transformers")
        remedy = "" if Version(installed) >= Version(FAST) else f"; {FAST} needs less than one"
        logger.info("tokenizer: transformers %s imported in %.1f s%s", installed, seconds, remedy)
