"""Loads the checkpoint's tokenizer through transformers."""

import logging
import threading
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_importing = threading.Lock()  # of two threads at once, one would get half of transformers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
)


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model directory, None if it has no tokenizer files."""
    if not any((Path(model) / name).is_file() for name in TOKENIZER_FILES):
        logger.warning(
            "%s has no tokenizer: prompts must be token ids, outputs have no text", model
        )
        return None
    with _importing:
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # whatever the files provoke in transformers or tokenizers
        raise ValueError(
            f"the tokenizer of {model} cannot be loaded ({type(error).__name__}: {error}): "
            "are its files complete?"
        ) from error
