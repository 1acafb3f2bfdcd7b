"""`ImagePrompts`: the images of prompts, opened and counted, and their places among the tokens.

A prompt has one placeholder for each image, as chat templates write them; it is repeated to the
image's number of tokens, which its size alone tells. Imports no torch.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from nanovllm.images.picture import PartImage, PlacedPicture, SizedPicture, unwrap
from nanovllm.images.processor import ImageProcessor, read_limits
from nanovllm.images.urls import Media
from nanovllm.utils.checks import check_int

OTHERS = {  # keys of multi_modal_data elsewhere
    "audio": "sound is",
    "video": "videos are",
    "image_embeds": "embeddings of images are",
    "vision_chunk": "videos are",
}
SIZED = "mm_processor_kwargs"
MAX_IMAGES = 999  # in a prompt, as in vLLM
LIMIT = "limit_mm_per_prompt"


class ImageTokens(NamedTuple):
    """The placeholders of a model.

    Attributes:
        token_id: token that stands for a part of an image.
        text: placeholder of an image in a text.
        expanded: text that takes its place before it is tokenised, with the token once; "": none.
        text_of_id: text of the token, where it is another than the placeholder.
        begin_id: token of the placeholder, where it is another.
    """

    token_id: int
    text: str
    expanded: str = ""
    text_of_id: str = ""
    begin_id: int = -1


class NoImages:
    """The images of prompts where there are none.

    Args:
        reason: reason why, with the remedy.
    """

    fetches = False

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def open(self, data: Any, limits: Any, name: str) -> list[SizedPicture]:
        """No images. ValueError if there are some, see `ImagePrompts.open`."""
        if images_of(data, name):
            self.refuse(name)
        where = f'{name}["{SIZED}"]'
        if read_limits(limits, where):
            raise ValueError(f"`{where}` has no effect: {self._reason}")
        return []

    def refuse(self, name: str) -> NoReturn:
        """Raise ValueError: no images may stand in `name`."""
        raise ValueError(f"`{name}` must have no images: {self._reason}")

    def find(self, given: Any, name: str, count: int) -> NoReturn:
        """Raise ValueError: no images may stand in a message."""
        self.refuse(name)

    def in_text(self, text: str) -> str:
        """A prompt's text as it is tokenised."""
        return text

    def check_parts(self, token_ids: list[int], num_images: int, name: str) -> None:
        """Nothing: no token stands for an image."""

    def place(
        self, token_ids: list[int], images: Sequence[SizedPicture], name: str
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """The tokens as they are, and no places."""
        return token_ids, ()


class ImagePrompts:
    """The images of one engine's prompts.

    Args:
        processor: processor of the model, with the engine's limits.
        tokens: placeholders of the model.
        max_images: maximum number of images in a prompt.
        max_tokens: maximum number of tokens of an image.
        media: images that messages may name.

    Attributes:
        fetches: whether `find` may wait for a host.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        tokens: ImageTokens,
        max_images: int,
        max_tokens: int,
        media: Media,
    ) -> None:
        self.processor, self.tokens, self._media = processor, tokens, media
        self._max_images, self._max_tokens = max_images, max_tokens
        self.fetches = media.fetches

    def find(self, given: Any, name: str, count: int) -> Any:
        """The image in a message, the `count`-th of its conversation. Strings name what
        `Media.find` allows, also as the `path` of a dictionary; a Path is the program's own.

        Raises:
            TypeError, ValueError: if it must not be read, or is one too many, which is not fetched.
        """
        if count > self._max_images:
            limit = _images(self._max_images)
            raise ValueError(f"`{name}` must be one of at most {limit} ({LIMIT})")
        if isinstance(given, Mapping):
            given, name = unwrap(given, name)
            given = os.fspath(given) if isinstance(given, os.PathLike) else given
        return self._media.find(given, name) if isinstance(given, str) else given

    def open(self, data: Any, limits: Any, name: str) -> list[SizedPicture]:
        """The images of a prompt, of which the sizes are read.

        Args:
            data: its `multi_modal_data`; None: it has none.
            limits: its `mm_processor_kwargs`.
            name: name of the prompt in errors.

        Raises:
            TypeError, ValueError: naming the mistake.
        """
        given = images_of(data, name)
        if len(given) > self._max_images:
            limit = _images(self._max_images)
            raise ValueError(f"`{name}` must have at most {limit} ({LIMIT}), got {len(given)}")
        processor = self.processor.with_limits(limits, f'{name}["{SIZED}"]')
        return [self._size(image, of, processor) for of, image in given.items()]

    def _size(self, given: Any, name: str, processor: ImageProcessor) -> SizedPicture:
        from nanovllm.images.reading import open_picture  # with numpy

        if isinstance(given, PartImage):
            processor = processor.with_limits(given.limits, given.part)
            given, name = given.image, given.name
        picture = open_picture(given, name)
        try:
            height, width = processor.resized(picture.height, picture.width)
        except ValueError as error:
            raise ValueError(f"`{name}` {error}") from None
        count = processor.num_tokens(height, width)
        if count > self._max_tokens:
            raise ValueError(
                f"`{name}` must have at most {self._max_tokens} tokens, got {count} of "
                f"{width} x {height} pixels: lower max_pixels in {SIZED}, or raise it in those of "
                "LLM()"
            )
        least = processor.least_tokens(picture.height, picture.width)
        return SizedPicture(picture, height, width, count, least)

    def in_text(self, text: str) -> str:
        """A prompt's text as it is tokenised."""
        if not self.tokens.expanded:
            return text
        return text.replace(self.tokens.text, self.tokens.expanded)

    def check_parts(self, token_ids: list[int], num_images: int, name: str) -> None:
        """Check that the texts of a conversation have no placeholders.

        Args:
            token_ids: tokens of the conversation, with a placeholder for each of its images.
            num_images: number of its images.
            name: name of the conversation in errors.

        Raises:
            ValueError: if there are more placeholders than images.
        """
        found = self._count(token_ids, num_images)
        if found > num_images:
            names = " or ".join(filter(None, (self.tokens.text, self.tokens.text_of_id)))
            raise ValueError(
                f"`{name}` must have a part with an image for each placeholder {names}, got "
                f"{found} for {_images(num_images)}: add such a part, or write it otherwise in "
                "the text"
            )

    def place(
        self, token_ids: list[int], images: Sequence[SizedPicture], name: str
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """Give images their places in a prompt.

        Args:
            token_ids: tokens of the prompt, with a placeholder for each image; or already with as
                many as each image has tokens.
            images: its images.
            name: name of the prompt in errors.

        Returns:
            The tokens with all placeholders, and the places.

        Raises:
            ValueError: if there are more or fewer placeholders than images.
        """
        pad = self.tokens.token_id
        runs = _runs(token_ids, pad)
        counts = [image.num_tokens for image in images]
        if images and [end - start for start, end in runs] == counts:
            places = zip((start for start, _ in runs), images, strict=True)
            return token_ids, tuple(PlacedPicture(*each) for each in places)
        found = self._count(token_ids, len(images))
        if found != len(images):
            raise ValueError(self._mismatch(found, counts, name))
        if not images:
            return token_ids, ()
        placed: list[PlacedPicture] = []
        whole: list[int] = []
        rest = iter(images)
        for token_id in token_ids:
            if token_id == pad:
                image = next(rest)
                placed.append(PlacedPicture(len(whole), image))
                whole.extend([pad] * image.num_tokens)
            else:
                whole.append(token_id)
        return whole, tuple(placed)

    def _count(self, token_ids: list[int], num_images: int) -> int:
        """Number of placeholders in a prompt with so many images: without any, a text is tokenised
        as it is (see `in_text`).
        """
        begins = 0 if num_images else token_ids.count(self.tokens.begin_id)
        return begins or token_ids.count(self.tokens.token_id)

    def _mismatch(self, found: int, counts: list[int], name: str) -> str:
        needed, images = len(counts), _images(len(counts))
        in_ids = f" ({self.tokens.text_of_id} in token ids)" * bool(self.tokens.text_of_id)
        said = f"`{name}` must have a placeholder {self.tokens.text}{in_ids} for each image"
        if not needed:
            return f"{said}, got {found} without images: pass them in multi_modal_data"
        if found > needed and sum(counts) != found:
            also = f", or as many as they have tokens ({sum(counts):,})"
        else:
            also = ""
        return f"{said}{also}, got {found} for {images}"


def remedies(length: int, images: Sequence[SizedPicture], limit: int, last: str) -> str:
    """The remedies for a prompt that is too long, for its longer part first. One that cannot be
    enough by itself is left out, unless none is enough.

    Args:
        length: number of tokens of the prompt.
        images: its images.
        limit: number of tokens that it must stay below.
        last: remedy that raises the limit.
    """
    of_images = sum(image.num_tokens for image in images)
    of_text, least = length - of_images, sum(image.least_tokens for image in images)
    shorten = "shorten the text" if images else "shorten it"
    smaller = f"lower max_pixels in {SIZED}, which bounds an image's tokens"
    ways = []  # number of tokens of a part, and the way to fewer
    if of_images < limit:
        ways.append((of_text, shorten))
    if least < of_images and of_text + least < limit:
        ways.append((of_images, smaller))
    elif len(images) > 1 and of_text + min(image.num_tokens for image in images) < limit:
        ways.append((of_images, "pass fewer images"))
    if of_text >= limit and of_images >= limit:
        ways.append((0, f"{shorten} and {smaller}" if least < of_images else "shorten both"))
    return ", ".join([*(way for _, way in sorted(ways, reverse=True)), "or " * bool(ways) + last])


def read_max_images(limit: Any) -> int:
    """The maximum number of images in a prompt that `limit_mm_per_prompt` allows.

    Raises:
        TypeError, ValueError: if it is no such limit.
    """
    if limit is None:
        return MAX_IMAGES
    if not isinstance(limit, Mapping):
        raise TypeError(f'`{LIMIT}` must be a dictionary like {{"image": 2}}, got {limit!r}')
    max_images = MAX_IMAGES
    for kind, value in limit.items():
        count: Any = value.get("count") if isinstance(value, Mapping) else value
        if kind not in ("image", "video", "audio"):
            raise ValueError(f'`{LIMIT}` must have the key "image", got {kind!r}')
        check_int(f"{LIMIT}.{kind}", count, 0)
        if kind == "image":
            max_images = int(count)
        elif count:
            raise ValueError(
                f"`{LIMIT}.{kind}` must be 0, got {count}: prompts have text and images alone"
            )
    return max_images


def images_of(data: Any, name: str) -> dict[str, Any]:
    """The images in a prompt's `multi_modal_data`, keyed by their names in errors.

    Raises:
        TypeError, ValueError: if there is anything but images.
    """
    if data is None:
        return {}
    where = f'{name}["multi_modal_data"]'
    if not isinstance(data, Mapping):
        raise TypeError(f'`{where}` must be a dictionary with "image", got {type(data).__name__}')
    for key, value in data.items():
        if key in OTHERS and value is not None and value != []:
            raise ValueError(f"`{where}` must have images alone: {OTHERS[key]} not supported")
        if key != "image" and key not in OTHERS:
            raise ValueError(f'`{where}` must have the key "image" and no others, got {key!r}')
    given = data.get("image")
    if given is None:
        return {}
    if isinstance(given, (list, tuple)):
        return {f'{where}["image"][{i}]': image for i, image in enumerate(given)}
    return {f'{where}["image"]': given}


def _images(count: int) -> str:
    return f"{count} image{'s' * (count != 1)}"


def _runs(token_ids: list[int], pad: int) -> list[tuple[int, int]]:
    """The runs of placeholders, each from its first index to that after its last."""
    runs: list[tuple[int, int]] = []
    index, count = 0, len(token_ids)
    while index < count:
        try:
            start = index = token_ids.index(pad, index)
        except ValueError:
            break
        while index < count and token_ids[index] == pad:
            index += 1
        runs.append((start, index))
    return runs
