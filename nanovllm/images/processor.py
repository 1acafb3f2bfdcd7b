"""`ImageProcessor`: the form of a checkpoint's images, from its preprocessor_config.json.

The size of a picture alone tells the size to which it is resized, and its number of tokens. No
torch here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.files import PROCESSORS, has_file, read_json
from nanovllm.utils.checks import check_int

NESTED, PLAIN = PROCESSORS  # the first one has priority
MAX_RATIO = 200  # of the sides of an image, as Qwen's processors have it
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
KEPT_RATIO, FIXED_SIZE = ("Qwen2VL", "Qwen3VL", "Qwen3_5"), ("Gemma3",)  # names of processors
TEXT_ALONE = "pass language_model_only=True for text alone"
OVERRIDES = ("max_pixels", "min_pixels", "size")
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # keys of `size`


@dataclass(frozen=True)
class ImageProcessor:
    """The size and the numbers of an image, as a model was trained with them.

    Attributes:
        patch_size: pixels of a patch's side.
        merge: patches on each side of the square that becomes one token; 0: `fixed_tokens` is the
            number of tokens.
        resample: filter of resizing, "bicubic" or "bilinear".
        min_pixels, max_pixels: bounds on the area of a resized image, whose ratio of sides is kept.
        fixed_size: height and width of all images in the place of these bounds; None: they hold.
        fixed_tokens: number of tokens of an image of fixed size.
        mean, std: mean and deviation of each colour, from 0 to 1, by which pixels are normalised.
        frames: number of times that an image is repeated in its patches.
    """

    patch_size: int
    merge: int
    resample: str
    min_pixels: int = 0
    max_pixels: int = 0
    fixed_size: tuple[int, int] | None = None
    fixed_tokens: int = 0
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    frames: int = 1

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image of this size is resized.

        Without a fixed size both are the nearest multiples of a token's side, and if the area is
        out of its bounds then, those below or above of the image scaled into them (`smart_resize`
        of Qwen2-VL's processor).

        Raises:
            ValueError: if one side is more than 200 times the other.
        """
        if self.fixed_size is not None:
            return self.fixed_size
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(
                f"must have sides of which one is at most {MAX_RATIO} times the other, got "
                f"{width} x {height} pixels: cut it"
            )
        unit = self.patch_size * self.merge
        found = round(height / unit) * unit, round(width / unit) * unit
        area = found[0] * found[1]
        if area > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            found = (
                max(unit, math.floor(height / scale / unit) * unit),
                max(unit, math.floor(width / scale / unit) * unit),
            )
        elif area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            found = (
                math.ceil(height * scale / unit) * unit,
                math.ceil(width * scale / unit) * unit,
            )
        return found

    def num_tokens(self, height: int, width: int) -> int:
        """The number of tokens of an image that is resized to this size."""
        if self.fixed_tokens:
            return self.fixed_tokens
        return height * width // (self.patch_size * self.merge) ** 2

    def least_tokens(self, height: int, width: int) -> int:
        """The number of tokens of an image of this size at the lowest `max_pixels`."""
        smallest = replace(self, min_pixels=0, max_pixels=(self.patch_size * self.merge) ** 2)
        return self.num_tokens(*smallest.resized(height, width))

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the largest image."""
        unit = (self.patch_size * self.merge) ** 2
        return self.fixed_tokens or self.max_pixels // unit

    def with_limits(self, given: Mapping[str, Any] | None, name: str) -> "ImageProcessor":
        """The same with `mm_processor_kwargs` of the caller.

        Args:
            given: `max_pixels`, `min_pixels`, or both in `size` as `longest_edge` and
                `shortest_edge`; None: nothing.
            name: name of the argument in errors.

        Raises:
            TypeError, ValueError: naming the key that is wrong.
        """
        if not given:
            return self
        limits = read_limits(given, name)
        if limits and self.fixed_size is not None:
            height, width = self.fixed_size
            raise ValueError(
                f"`{name}` has no effect on this model, whose images are all {width} x {height} "
                f"pixels and {self.fixed_tokens} tokens: leave it out"
            )
        most = limits.get("max_pixels", self.max_pixels)
        least = limits.get("min_pixels", min(self.min_pixels, most))
        smallest = max(least, (self.patch_size * self.merge) ** 2)
        if most < smallest:
            raise ValueError(
                f"`{name}` must allow an image of {smallest} pixels, got at most {most}"
            )
        return replace(self, min_pixels=least, max_pixels=most)


def read_limits(given: Any, name: str) -> dict[str, int]:
    """`max_pixels` and `min_pixels` of `mm_processor_kwargs`. `name` stands for it in errors.

    Raises:
        TypeError, ValueError: naming the key that is wrong.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"`{name}` must be a dictionary with max_pixels or min_pixels, got {given!r}"
        )
    if unknown := [key for key in given if key not in OVERRIDES]:
        raise ValueError(
            f"`{name}` must have the keys {', '.join(OVERRIDES)}, and no others, got {unknown[0]!r}"
        )
    size = given.get("size") or {}
    if not isinstance(size, Mapping) or not set(size) <= set(EDGES.values()):
        raise ValueError(
            f'`{name}["size"]` must have the keys longest_edge and shortest_edge (areas in '
            f"pixels), got {size!r}"
        )
    limits = {}
    for key, edge in EDGES.items():
        if size.get(edge) is not None and given.get(key) is not None:
            raise ValueError(
                f"`{name}` must have either {key} or {edge} of size, got both: leave one out"
            )
        value = given.get(key) if size.get(edge) is None else size[edge]
        if value is not None:
            check_int(f"{name}.{key}", value, 1)
            limits[key] = int(value)
    return limits


def read_processor(directory: Path, vision: Mapping[str, Any], tokens: int) -> ImageProcessor:
    """The processor of a checkpoint.

    Args:
        directory: checkpoint's directory.
        vision: `vision_config` of its config.json.
        tokens: `mm_tokens_per_image` of its config.json; 0: none.

    Raises:
        ValueError: if its files are missing, or want what is not supported.
    """
    name, raw = _read(directory)
    kind = str(raw.get("image_processor_type", ""))
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if raw.get(key, True) is not True:
            raise _unsupported(name, key, raw[key], True)
    if raw.get("do_pan_and_scan"):
        raise _unsupported(name, "do_pan_and_scan", raw["do_pan_and_scan"], False)
    if abs(_number(name, raw, "rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise _unsupported(name, "rescale_factor", raw["rescale_factor"], 1 / 255)
    colours = {
        "mean": _colours(name, raw, "image_mean"),
        "std": _colours(name, raw, "image_std"),
    }
    if kind.startswith(KEPT_RATIO):
        return _kept_ratio(name, raw, colours)
    if kind.startswith(FIXED_SIZE):
        return _fixed_size(name, raw, colours, vision, tokens)
    raise ValueError(f"{name}: `image_processor_type` {kind!r} is not supported: {TEXT_ALONE}")


def _read(directory: Path) -> tuple[str, dict[str, Any]]:
    """The name of the file, and the object in it."""
    if has_file(directory / NESTED):
        nested = read_json(directory / NESTED).get("image_processor")
        if isinstance(nested, dict):
            return NESTED, nested
    if not has_file(directory / PLAIN):
        raise ValueError(
            f"{directory} has no {PLAIN}, which says how images are resized: download the "
            f"checkpoint again, or {TEXT_ALONE}"
        )
    return PLAIN, read_json(directory / PLAIN)


def _kept_ratio(
    name: str, raw: dict[str, Any], colours: dict[str, tuple[float, ...]]
) -> ImageProcessor:
    size = raw.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(f"{name}: `size` must be an object, got {size!r}")
    # The defaults are those of Qwen2-VL's processor; the older keys have priority, as there.
    edges = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280, **size}
    edges |= {edge: raw[key] for key, edge in EDGES.items() if raw.get(key) is not None}
    return ImageProcessor(
        patch_size=_whole(name, raw, "patch_size", 14),
        merge=_whole(name, raw, "merge_size", 2),
        resample=_resample(name, raw, 3),
        min_pixels=_whole(name, edges, "shortest_edge"),
        max_pixels=_whole(name, edges, "longest_edge"),
        frames=_whole(name, raw, "temporal_patch_size", 2),
        **colours,  # type: ignore[arg-type]
    )


def _fixed_size(
    name: str,
    raw: dict[str, Any],
    colours: dict[str, tuple[float, ...]],
    vision: Mapping[str, Any],
    tokens: int,
) -> ImageProcessor:
    size = raw.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(f"{name}: `size` must be an object, got {size!r}")
    side = _whole("config.json: vision_config", vision, "image_size", 896)
    given = _whole(name, size, "height", 224), _whole(name, size, "width", 224)
    if given != (side, side):
        raise ValueError(
            f"{name}: `size` must be that of `image_size` in config.json, {side} x {side}, got "
            f"{given[0]} x {given[1]}"
        )
    patch = _whole("config.json: vision_config", vision, "patch_size", 14)
    return ImageProcessor(
        patch_size=patch,
        merge=0,
        resample=_resample(name, raw, 2),
        fixed_size=given,
        fixed_tokens=tokens,
        **colours,  # type: ignore[arg-type]
    )


def _whole(name: str, raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: `{key}` must be an integer, at least 1, got {value!r}")
    return value


def _number(name: str, raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}: `{key}` must be a number, got {value!r}")
    return value


def _colours(name: str, raw: Mapping[str, Any], key: str) -> tuple[float, ...]:
    value = raw.get(key)
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not all(type(x) in (int, float) and math.isfinite(x) for x in value)
        or (key == "image_std" and not all(value))
    ):
        raise ValueError(f"{name}: `{key}` must be three numbers, got {value!r}")
    return tuple(map(float, value))


def _resample(name: str, raw: Mapping[str, Any], default: int) -> str:
    value = raw.get("resample")
    value = default if value is None else value
    if value not in RESAMPLE:
        raise ValueError(f"{name}: `resample` must be 2 (bilinear) or 3 (bicubic), got {value!r}")
    return RESAMPLE[value]


def _unsupported(name: str, key: str, value: Any, rule: Any) -> ValueError:
    return ValueError(f"{name}: `{key}` must be {rule!r}, got {value!r}: {TEXT_ALONE}")
