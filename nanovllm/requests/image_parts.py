"""`ImageParts`: the images in the parts of messages. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from nanovllm.images.picture import PartImage
from nanovllm.images.processor import read_limits
from nanovllm.images.prompts import ImagePrompts, NoImages
from nanovllm.images.urls import is_remote
from nanovllm.utils.checks import is_list, shown

# Types of parts with an image, and the keys that may hold it.
TYPES = {
    "image_url": ("image_url",),  # OpenAI's
    "input_image": ("image_url",),
    "image": ("image", "url", "path"),  # transformers' and Qwen's
    "image_pil": ("image_pil",),  # vLLM's
}
LIMITS = ("max_pixels", "min_pixels")  # Qwen's, beside the image
DETAILS = ("auto", "high")  # OpenAI's, which ask for no smaller image
OTHER_TYPES = {
    **dict.fromkeys(("video", "video_url", "input_video"), "videos are"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sound is"),
    "image_embeds": "embeddings of images are",
}


def may_name_hosts(conversation: Any) -> bool:
    """Whether an image of a conversation may have to be fetched, before anything is checked."""
    if not is_list(conversation):
        return True
    contents = (each.get("content") for each in conversation if isinstance(each, Mapping))
    parts = (part for content in contents if is_list(content) for part in content)
    return any(isinstance(part, Mapping) and _names_host(part) for part in parts)


def _names_host(part: Mapping[str, Any]) -> bool:
    keys = (key for kind, keys in TYPES.items() if kind == part.get("type") for key in keys)
    given = [part.get(key) for key in keys]
    inner = [value for each in given if isinstance(each, Mapping) for value in each.values()]
    return any(isinstance(each, str) and is_remote(each) for each in [*given, *inner])


class ImageParts:
    """Takes the images out of a conversation's parts.

    Args:
        images: images of the engine's prompts.
        beside: images for parts that have none, in their order, by their names in errors.

    Attributes:
        found: images of the parts read so far, for `multi_modal_data`.
    """

    def __init__(self, images: ImagePrompts | NoImages, beside: Mapping[str, Any]) -> None:
        self._images, self._beside = images, list(beside.items())
        self.found: list[PartImage] = []

    def take(self, part: Any, name: str) -> bool:
        """Whether a part is an image, which is taken. `name` stands for the part in errors.

        Raises:
            TypeError, ValueError: if it has no image, or something else that is not supported.
        """
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            return False
        if kind in OTHER_TYPES:
            raise ValueError(
                f"`{name}` must be text or an image: {OTHER_TYPES[kind]} not supported"
            )
        if kind not in TYPES:
            return False
        if isinstance(self._images, NoImages):
            self._images.refuse(name)
        limits = _read_options(part, kind, name)
        for key in TYPES[kind]:
            if part.get(key) is not None:
                where = f'{name}["{key}"]'
                given = _url(part[key], where) if key == "image_url" else part[key]
                given = self._images.find(given, where, len(self.found) + 1)
                break
        else:
            if not self._beside:
                keys = " or ".join(f"`{key}`" for key in TYPES[kind])
                raise ValueError(f"`{name}` must have an image in {keys}, got none")
            where, given = self._beside.pop(0)
        self.found.append(PartImage(given, where, name, limits))
        return True

    def end(self, name: str) -> None:
        """ValueError if images beside the conversation are left."""
        if self._beside:
            raise ValueError(
                f'`{name}` must have a part {{"type": "image"}} for each image beside it, got '
                f"{len(self._beside)} fewer"
            )


def _read_options(part: Mapping[str, Any], kind: str, name: str) -> dict[str, int]:
    """The limits on an image's pixels that stand in its part.

    Raises:
        TypeError, ValueError: for a key that is not known, or a wrong value.
    """
    known = ("type", *TYPES[kind], *LIMITS, "detail")
    given = {key: value for key, value in part.items() if value is not None}
    if unknown := [key for key in given if key not in known]:
        raise ValueError(
            f"`{name}` must have the keys {', '.join(known)}, and no others, got {unknown[0]!r}"
        )
    _check_detail(given.get("detail"), name)
    return read_limits({key: given[key] for key in LIMITS if key in given}, name)


def _check_detail(detail: Any, name: str) -> None:
    if detail is not None and detail not in DETAILS:
        raise ValueError(
            f'`{name}["detail"]` must be {" or ".join(DETAILS)}, got {detail!r}: bound the size by '
            "max_pixels in the part"
        )


def _url(value: Any, name: str) -> Any:
    """The URL in OpenAI's object, or another value as it is."""
    if not isinstance(value, Mapping):
        return value
    if unknown := [key for key in value if key not in ("url", "detail") and value[key] is not None]:
        raise ValueError(f"`{name}` must have the key url, and no others, got {unknown[0]!r}")
    _check_detail(value.get("detail"), name)
    url = value.get("url")
    if not isinstance(url, str):
        raise ValueError(f"`{name}` must have a `url`, a string, got {shown(url)}")
    return url
