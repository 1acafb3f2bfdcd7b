"""Placeholders and images of a prompt."""

import numpy as np
import pytest
from PIL import Image as Pillow

from nanovllm.images.processor import ImageProcessor
from nanovllm.images.prompts import ImagePrompts, ImageTokens, remedies
from nanovllm.images.urls import Media

PROCESSOR = ImageProcessor(4, 2, "bicubic", min_pixels=64, max_pixels=64 * 50)
PAD, TEXT = 99, "<|image_pad|>"


def prompts(max_images=3, tokens=None, media=""):
    tokens = tokens or ImageTokens(PAD, TEXT)
    return ImagePrompts(PROCESSOR, tokens, max_images, 60, Media(str(media)))


def pixels(height, width):
    return np.zeros((height, width, 3), np.uint8)


def place(token_ids, *images):
    ours = prompts()
    opened = ours.open({"image": [*images]}, None, "prompt")
    return ours.place(token_ids, opened, "prompt")


def test_a_placeholder_is_repeated():
    whole, places = place([1, PAD, 2, PAD, PAD, 3], pixels(16, 24), pixels(8, 8), pixels(8, 16))
    assert whole == [1, *[PAD] * 6, 2, PAD, *[PAD] * 2, 3]
    assert [each.offset for each in places] == [1, 8, 9]
    assert [each.sized.num_tokens for each in places] == [6, 1, 2]


def test_placeholders_that_are_repeated_already():
    given = [1, *[PAD] * 6, 2, *[PAD] * 2, 3]
    whole, places = place(given, pixels(16, 24), pixels(8, 16))
    assert whole == given and [each.offset for each in places] == [1, 8]


@pytest.mark.parametrize(
    ("token_ids", "num_images", "message"),
    [
        ([1, PAD], 0, r"placeholder <\|image_pad\|> for each image, got 1 without images: pass"),
        ([1, 2], 1, "for each image, got 0 for 1 image$"),
        ([PAD, 1], 2, "for each image, got 1 for 2 images$"),
        ([PAD, 1, PAD], 1, r"or as many as they have tokens \(6\), got 2 for 1 image$"),
    ],
)
def test_as_many_placeholders_as_images(token_ids, num_images, message):
    with pytest.raises(ValueError, match="`prompt` must have a .*" + message):
        place(token_ids, *[pixels(16, 24)] * num_images)


def test_a_text_that_takes_the_place_of_a_placeholder():
    ours = prompts(tokens=ImageTokens(PAD, "<start>", "\n\n<start><soft><end>\n\n"))
    assert ours.in_text("a <start> b") == "a \n\n<start><soft><end>\n\n b"
    assert prompts().in_text(f"a {TEXT}") == f"a {TEXT}"


def test_limits_of_one_prompt():
    ours = prompts()
    [plain] = ours.open({"image": pixels(80, 40)}, None, "prompt")
    [small] = ours.open({"image": pixels(80, 40)}, {"max_pixels": 900}, "prompt")
    assert (plain.height, plain.width, plain.num_tokens) == (80, 40, 50)
    assert small.num_tokens < 900 / 64 < plain.num_tokens
    with pytest.raises(ValueError, match=r"at most 60 tokens, got 100 .*: lower max_pixels in"):
        ours.open({"image": pixels(80, 80)}, {"max_pixels": 99999}, "prompt")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"video": [0]}, r"\"multi_modal_data\"\]` must have images alone: videos are not"),
        ({"image": None, "audio": b""}, "must have images alone: sound is not supported"),
        ({"images": []}, "must have the key \"image\" and no others, got 'images'"),
        ([1], 'must be a dictionary with "image", got list'),
        ({"image": [pixels(8, 8)] * 4}, "`prompt` must have at most 3 images .*, got 4"),
        ({"image": "no.png"}, "cannot be read: 'no.png': No such file or directory$"),
        ({"image": [pixels(8, 8), 7]}, r"\[\"image\"\]\[1\]` must be a PIL image"),
        ({"image": pixels(2, 402)}, r"\[\"image\"\]` must have sides of which one is at most 200"),
    ],
)
def test_what_is_refused(data, message):
    with pytest.raises((TypeError, ValueError), match=message):
        prompts().open(data, None, "prompt")


def test_nothing_given():
    for data in (None, {}, {"image": None}, {"image": [], "video": None}):
        assert prompts().open(data, None, "prompt") == []


def test_files_that_messages_may_name(tmp_path):
    allowed, other = tmp_path / "a", tmp_path / "b"
    for folder in (allowed, other):
        folder.mkdir()
        Pillow.new("RGB", (8, 8)).save(folder / "x.png")
    (allowed / "link.png").symlink_to(other / "x.png")
    media = Media(str(allowed))
    for named in (str(allowed / "x.png"), (allowed / "x.png").as_uri()):
        assert media.find(named, "url") == allowed / "x.png"
    assert media.find("data:image/png;base64,AAAA", "url") == "data:image/png;base64,AAAA"
    for path in (other / "x.png", allowed / "link.png", allowed / ".." / "b" / "x.png"):
        with pytest.raises(ValueError, match="`url` must be a file below `allowed_local_media_pa"):
            media.find(path.as_uri() if path.is_symlink() else str(path), "url")
    secret = other / "x.png"
    ours = prompts(media=allowed)
    assert ours.find({"path": allowed / "x.png", "bytes": None}, "part", 1) == allowed / "x.png"
    assert ours.find({"path": str(secret), "bytes": b"x"}, "part", 1) == b"x"
    refused = r"\[\"(bytes|path)\"\]` must be"
    for named in (str(secret), secret.as_uri()):
        for nested in (named, {"path": named}, {"bytes": named}, [named]):
            for spelling in ({"bytes": nested}, {"path": nested}, {"path": {"path": nested}}):
                with pytest.raises(
                    (TypeError, ValueError), match=r"`part\[\"(bytes|path)\"\]` must"
                ):
                    ours.find(spelling, "part", 1)
                if spelling != {"path": named}:  # and none that `find` might leave is opened
                    with pytest.raises(TypeError, match=refused):
                        ours.open({"image": spelling}, None, "p")
    with pytest.raises(ValueError, match="`part` must have `bytes` or `path`, got the keys"):
        ours.find({"url": str(secret)}, "part", 1)
    for find in (media.find, ours.find):
        with pytest.raises(ValueError, match=r"`url` must be a URL, got 'file://\[x': Invalid"):
            find("file://[x", "url", *([1] if find == ours.find else []))
    for kind in ("http", "s3"):
        with pytest.raises(
            ValueError, match=r"must be a picture, a path or a data URL, .*: download"
        ):
            ours.open({"image": f"{kind}://example.org/x.png"}, None, "p")
    for kind, remedy in (("http", "unless LLM"), ("ftp", "download it"), ("s3", "download it")):
        with pytest.raises(ValueError, match=f"^`url` must be a data URL.*: .*{remedy}"):
            media.find(f"{kind}://example.org/x.png", "url")
    with pytest.raises(ValueError, match="pass allowed_local_media_path to LLM"):
        Media("").find((allowed / "x.png").as_uri(), "url")
    with pytest.raises(ValueError, match="cannot be read"):
        media.find("a\0b", "url")


SMALLER = "lower max_pixels in mm_processor_kwargs, which bounds an image's tokens"


@pytest.mark.parametrize(
    ("of_text", "sizes", "limit", "found"),
    [
        (100, [], 100, "shorten it, or raise it"),
        (100, [(16, 24)], 90, "shorten the text, or raise it"),  # 6 tokens
        (100, [(16, 24)], 102, f"shorten the text, {SMALLER}, or raise it"),
        (5, [(32, 64)] * 2, 66, f"{SMALLER}, shorten the text, or raise it"),  # 32 tokens each
        (30, [(32, 64)] * 2, 33, f"{SMALLER}, or raise it"),
        (40, [(32, 64)] * 2, 33, f"shorten the text and {SMALLER}, or raise it"),
        (40, [(8, 8)] * 3, 42, "shorten the text, pass fewer images, or raise it"),
        (40, [(8, 8)] * 2, 39, "shorten the text, or raise it"),
        (0, [(8, 80)], 7, f"{SMALLER}, or raise it"),  # 10 tokens, at least 3
        (0, [(8, 80)], 3, "raise it"),
    ],
)
def test_what_to_do_about_a_long_prompt(of_text, sizes, limit, found):
    """`max_pixels` is named where lowering it helps, and shortening the text likewise."""
    images = prompts().open({"image": [pixels(*size) for size in sizes]}, None, "prompt")
    length = of_text + sum(image.num_tokens for image in images)
    assert remedies(length, images, limit, "raise it") == found
    if SMALLER in found:  # and it does help, with the text alone or beside its shortening
        data, lowest = {"image": [pixels(*size) for size in sizes]}, {"max_pixels": 64}
        images = prompts().open(data, {**lowest, "min_pixels": 1}, "prompt")
        least = sum(image.num_tokens for image in images)
        assert least + ("text and" not in found) * of_text < limit


def test_images_of_one_size_cannot_be_smaller():
    processor = ImageProcessor(4, 0, "bilinear", fixed_size=(32, 32), fixed_tokens=16)
    ours = ImagePrompts(processor, ImageTokens(PAD, TEXT), 9, 60, Media(""))
    for count, limit, said in (
        (1, 30, "shorten the text, or raise it"),
        (2, 40, "pass fewer images, shorten the text, or raise it"),
        (2, 36, "shorten the text, or raise it"),
    ):
        images = ours.open({"image": [pixels(9, 9)] * count}, None, "prompt")
        assert remedies(20 + 16 * count, images, limit, "raise it") == said
