"""The images of an engine's prompts, by its checkpoint and its options."""

from collections.abc import Callable
from typing import Any

from nanovllm.checkpoint.families import FAMILIES
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.vision import VisionConfig
from nanovllm.config import Config
from nanovllm.images.processor import ImageProcessor
from nanovllm.images.prompts import ImagePrompts, ImageTokens, NoImages, read_max_images
from nanovllm.images.urls import Media
from nanovllm.startup.build import read_image_processor


def read_own_processor(config: Config, model_config: ModelConfig) -> ImageProcessor | NoImages:
    """The processor of an engine's images, or why prompts have none.

    Args:
        config: options; `model` is a directory.
        model_config: facts of the checkpoint.

    Raises:
        ValueError: if the checkpoint's processor is missing or not supported,
            `mm_processor_kwargs` is not right for it, its token of images is beyond the vocabulary,
            or there are options about images and there are none.
    """
    if config.language_model_only:
        reason = "this engine was built with language_model_only=True: leave that out"
    elif model_config.vision is None:
        reason = _no_tower(model_config)
    else:
        _check_token(model_config.vision.image_token_id, model_config.vocab_size)
        return read_image_processor(config, model_config)
    _refuse_options(config, reason)
    return NoImages(reason)


def _no_tower(model_config: ModelConfig) -> str:
    """The reason for which a model does not see, with the remedy."""
    name = model_config.architecture
    if FAMILIES[name].tower and model_config.source.get("vision_config") is not None:
        return (
            "the checkpoint has no vision tower or no image processor, as the log says: "
            "download it again"
        )
    return f"{name} does not see: use a model like Qwen3-VL"


def _check_token(token: int, vocab_size: int) -> None:
    """ValueError for a token of images that the embedding does not have."""
    if token >= vocab_size:
        raise ValueError(
            f"the token of images must be one of the model's {vocab_size}, got {token}: save the "
            f"model after resize_token_embeddings({token + 1}), or pass language_model_only=True"
        )


def _refuse_options(config: Config, reason: str) -> None:
    """ValueError if an option allows or changes images, of which there are none for a reason."""
    limit = config.limit_mm_per_prompt
    given = {
        "limit_mm_per_prompt": "image" in (limit or ()) and read_max_images(limit) > 0,
        "mm_processor_kwargs": bool(config.mm_processor_kwargs),
        "allowed_local_media_path": bool(config.allowed_local_media_path),
        "allowed_media_domains": bool(config.allowed_media_domains),
    }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"`{name}` must be left out where there are no images, got "
                f"{getattr(config, name)!r}: {reason}"
            )


def make_image_prompts(
    processor: ImageProcessor | NoImages, config: Config, model_config: ModelConfig, tokenizer: Any
) -> ImagePrompts | NoImages:
    """The images of an engine's prompts.

    Args:
        processor: processor, from `read_own_processor`.
        config: options.
        model_config: facts of the checkpoint.
        tokenizer: tokenizer of transformers; None: the checkpoint has none.
    """
    if isinstance(processor, NoImages):
        return processor
    vision = model_config.vision
    assert vision is not None, "a processor without a tower"
    return ImagePrompts(
        processor,
        _tokens(processor, vision, model_config.source, tokenizer),
        read_max_images(config.limit_mm_per_prompt),
        max(config.max_num_batched_tokens, processor.max_tokens),
        Media(config.allowed_local_media_path, _fetch(config)),
    )


def _fetch(config: Config) -> Callable[[str, str], bytes] | None:
    """The function that fetches images; None without allowed hosts."""
    if not config.allowed_media_domains:
        return None
    from nanovllm.images.fetching import Fetcher  # with ssl

    return Fetcher(tuple(config.allowed_media_domains)).fetch


def _tokens(
    processor: ImageProcessor, vision: VisionConfig, whole: dict[str, Any], tokenizer: Any
) -> ImageTokens:
    def text(token_id: int) -> str:
        found = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token_id)
        return found or f"token {token_id}"

    token = vision.image_token_id
    if processor.fixed_size is None:
        return ImageTokens(token, text(token))
    # Gemma 3: templates write the begin alone.
    begin_id = whole.get("boi_token_index", -1)
    begin, end = text(begin_id), text(whole.get("eoi_token_index", -1))
    expanded = f"\n\n{begin}{text(token)}{end}\n\n"
    return ImageTokens(token, begin, expanded, text_of_id=text(token), begin_id=begin_id)
