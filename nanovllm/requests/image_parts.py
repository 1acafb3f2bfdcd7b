"""`ImageParts`: the images in the parts of messages. Imports no torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.images.prompts import ImagePrompts, NoImages

# Types of parts with an image, and the keys that may hold it.
TYPES = {
    "image_url": ("image_url",),  # OpenAI's
    "input_image": ("image_url",),
    "image": ("image", "url", "path"),  # transformers' and Qwen's
    "image_pil": ("image_pil",),  # vLLM's
}
OTHER_TYPES = {
    **dict.fromkeys(("video", "video_url", "input_video"), "videos are"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sound is"),
    "image_embeds": "embeddings of images are",
}


class ImageParts:
    """Takes the images out of a conversation's parts.

    Args:
        images: images of the engine's prompts.
        beside: images for parts that have none, in their order.

    Attributes:
        found: images of the parts read so far, for `multi_modal_data`.
    """

    def __init__(self, images: ImagePrompts | NoImages, beside: Iterable[Any] = ()) -> None:
        self._images, self._beside = images, list(beside)
        self.found: list[Any] = []

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
        for key in TYPES[kind]:
            if part.get(key) is not None:
                where = f'{name}["{key}"]'
                given = _url(part[key], where) if key == "image_url" else part[key]
                self.found.append(self._images.find(given, where, len(self.found) + 1))
                return True
        if not self._beside:
            keys = " or ".join(f"`{key}`" for key in TYPES[kind])
            raise ValueError(f"`{name}` must have an image in {keys}, got none")
        self.found.append(self._beside.pop(0))
        return True

    def end(self, name: str) -> None:
        """ValueError if images beside the conversation are left."""
        if self._beside:
            raise ValueError(
                f'`{name}` must have a part {{"type": "image"}} for each image beside it, got '
                f"{len(self._beside)} images more"
            )


def _url(value: Any, name: str) -> Any:
    """The URL in OpenAI's object, or another value as it is."""
    if not isinstance(value, Mapping):
        return value
    url = value.get("url")
    if not isinstance(url, str):
        raise ValueError(f"`{name}` must have a `url`, a string, got {url!r}")
    return url
