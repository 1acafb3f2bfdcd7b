"""Pixels of all kinds of pictures, with the bits of transformers' processors on torchvision."""

import base64
import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from oracle import GEMMA, QWEN, pixels
from PIL import Image as Pillow
from PIL import features
from transformers.image_utils import load_image

from nanovllm.images.picture import READING
from nanovllm.images.processor import read_processor
from nanovllm.images.reading import open_picture
from nanovllm.images.resizing import resize

RNG = np.random.default_rng(1)


def noise(height, width, channels=3):
    """Smooth noise: JPEG and resizing keep some of it."""
    small = RNG.integers(0, 256, (height // 4 + 1, width // 4 + 1, channels), dtype=np.uint8)
    return np.repeat(np.repeat(small, 4, 0), 4, 1)[:height, :width].copy()


def ours(raw, given, directory):
    """The pixels that the engine makes of an image, [H, W, 3]."""
    (directory / "preprocessor_config.json").write_text(json.dumps(raw))
    processor = read_processor(directory, {"image_size": 48, "patch_size": 8}, 4)
    picture = open_picture(given, "image")
    read = picture.read()
    assert read.shape == (picture.height, picture.width, 3) and read.dtype == np.uint8
    return resize(read, *processor.resized(*read.shape[:2]), processor.resample)


def pictures():
    """Pictures of all modes, with a suffix and options for saving them."""
    rgb, gray = noise(75, 130), noise(75, 130, 1)[..., 0]
    rgba = np.dstack([rgb, noise(75, 130, 1)])
    yield "rgb.png", Pillow.fromarray(rgb), {}
    yield "rgb.jpg", Pillow.fromarray(rgb), {"quality": 80}
    yield "rgb.webp", Pillow.fromarray(rgb), {}
    yield "large.png", Pillow.fromarray(noise(500, 300)), {}
    yield "small.png", Pillow.fromarray(noise(9, 21)), {}
    yield "same.png", Pillow.fromarray(noise(64, 96)), {}
    yield "gray.png", Pillow.fromarray(gray), {}
    yield "bits.png", Pillow.fromarray(gray).convert("1"), {}
    yield "gray_alpha.png", Pillow.fromarray(np.dstack([gray, gray])), {}
    yield "rgba.png", Pillow.fromarray(rgba), {}
    yield "palette.png", Pillow.fromarray(rgb).quantize(16), {}
    yield "see_through.png", Pillow.fromarray(rgb).quantize(16), {"transparency": 3}
    yield "cmyk.jpg", Pillow.fromarray(rgb).convert("CMYK"), {}
    frames = [Pillow.fromarray(noise(75, 130)) for _ in range(2)]
    yield "moving.gif", frames[0], {"save_all": True, "append_images": frames[1:]}
    for orientation in range(1, 9):
        exif = Pillow.Exif()
        exif[0x0112] = orientation
        yield f"turned{orientation}.jpg", Pillow.fromarray(rgb), {"exif": exif}
        yield f"turned{orientation}.tif", Pillow.fromarray(rgb), {"exif": exif}
    yield "turned.png", Pillow.fromarray(rgb), {"exif": exif}


PICTURES = {name: (image, options) for name, image, options in pictures()}


@pytest.mark.parametrize("name", PICTURES)
def test_files_bytes_and_urls(name, tmp_path):
    """They are turned as EXIF data say, and transparency is left out, as by `load_image`."""
    image, options = PICTURES[name]
    path = tmp_path / name
    image.save(path, **options)
    loaded = load_image(str(path))
    expected = pixels(QWEN, loaded)
    data = path.read_bytes()
    url = "data:image/x;base64,%20\n" + base64.encodebytes(data).decode()  # in lines
    for given in (path, str(path), data, url, path.as_uri()):
        np.testing.assert_array_equal(ours(QWEN, given, tmp_path), expected)
    np.testing.assert_array_equal(ours(GEMMA, path, tmp_path), pixels(GEMMA, loaded))


@pytest.mark.parametrize("name", PICTURES)
def test_images_of_pillow(name, tmp_path):
    """They are taken as they lie, on white where they are transparent."""
    image, options = PICTURES[name]
    image.save(tmp_path / name, **options)
    with Pillow.open(tmp_path / name) as given:
        np.testing.assert_array_equal(ours(QWEN, given, tmp_path), pixels(QWEN, given))


XMP = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/">
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>
</rdf:RDF></x:xmpmeta>"""


def test_an_image_of_pillow_that_turns_when_it_is_read(tmp_path):
    """It has its orientation in XMP alone; the size before was announced, and pixels squeezed."""
    path = tmp_path / "a.tif"
    Pillow.fromarray(noise(50, 200)).save(path, tiffinfo={700: XMP})
    for raw in (QWEN, GEMMA):
        given = Pillow.open(path)
        before = given.size
        assert (ours(raw, given, tmp_path) == pixels(raw, Pillow.open(path))).all()
        assert before == given.size[::-1]
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="`image` cannot be read: "):
        open_picture(Pillow.open(path), "image").read()


@pytest.mark.parametrize("shape", [(75, 130), (75, 130, 1), (75, 130, 3), (75, 130, 4)])
def test_arrays(shape, tmp_path):
    given = noise(*shape[:2], (*shape, 1)[2])
    given[:20, :20] = 255
    given = given.reshape(shape)
    expected = pixels(QWEN, given if len(shape) == 3 else given[..., None])
    np.testing.assert_array_equal(ours(QWEN, given, tmp_path), expected)
    if len(shape) == 3:
        first = np.ascontiguousarray(given.transpose(2, 0, 1))
        np.testing.assert_array_equal(ours(QWEN, first, tmp_path), pixels(QWEN, first))
        for mirrored in (given[::-1], given[:, ::-1], given[..., ::-1]):  # BGR of OpenCV, say
            expected = pixels(QWEN, mirrored.copy())
            np.testing.assert_array_equal(ours(QWEN, mirrored, tmp_path), expected)


def test_arrays_that_cannot_be_read():
    class Broken:
        def __array__(self, *_, **__):
            raise RuntimeError("it is on a GPU")

    with pytest.raises(TypeError, match="`image` cannot be read as an array: RuntimeError: it is"):
        open_picture(Broken(), "image")


def test_the_same_bits_in_many_threads(tmp_path):
    """PyTorch divides no image among threads, nor do several threads disturb each other."""
    given = [noise(90 + i, 150 - i) for i in range(12)]
    alone = [resize(each, 64, 96, filter) for each in given for filter in ("bicubic", "bilinear")]
    with ThreadPoolExecutor(8) as pool:
        many = [
            pool.submit(resize, each, 64, 96, filter)
            for each in given
            for filter in ("bicubic", "bilinear")
        ]
    for one, future in zip(alone, many, strict=True):
        np.testing.assert_array_equal(one, future.result())


def test_one_image_of_pillow_in_many_threads(tmp_path):
    """Its file is read once, by the first; Pillow itself guards nothing."""
    Pillow.fromarray(noise(400, 600)).save(tmp_path / "a.png")
    expected = np.asarray(Pillow.open(tmp_path / "a.png"))
    for _ in range(5):
        with Pillow.open(tmp_path / "a.png") as image, ThreadPoolExecutor(8) as pool:
            pictures = [open_picture(image, "image") for _ in range(8)]
            for found in pool.map(lambda picture: picture.read(), pictures):
                np.testing.assert_array_equal(found, expected)


MEASURE = r"""
import re, sys
from pathlib import Path
from nanovllm.images.reading import open_picture
def peak():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
*small, large = sys.argv[1:]
for path in small:
    open_picture(path, "image").read()
before = peak()
pixels = open_picture(large, "image").read()
print((peak() - before) / (pixels.shape[0] * pixels.shape[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["rgb.jpg", "rgb.webp", "see_through.png"])
def test_memory_of_reading(name, tmp_path):
    """What is counted for a pixel is not less than what the process needs."""
    shape = (2000, 2000)
    rgb = Pillow.fromarray(noise(*shape))
    image = rgb.quantize(16) if "see" in name else rgb
    small, large = tmp_path / f"small_{name}", tmp_path / name
    image.save(large, **PICTURES[name][1])
    image.crop((0, 0, 64, 64)).save(small, **PICTURES[name][1])
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert 8 < float(ran.stdout) <= READING


def save(path, image, **options):
    image.save(path, **options)
    return path


REFUSED = {
    "empty": lambda at: (at.write_bytes(b"") and at) or at,
    "text": lambda at: at.write_text("no picture") and at,
    "script": lambda at: save(at.with_suffix(".eps"), Pillow.new("RGB", (9, 9))),
    "missing": lambda at: at,
    "folder": lambda at: at.mkdir() or at,
    "null": lambda at: "a\0b",
    "16_bits": lambda at: save(
        at.with_suffix(".png"), Pillow.fromarray(np.zeros((9, 9), np.uint16))
    ),
    "floats": lambda at: Pillow.new("F", (9, 9)),
    "http": lambda at: "https://example.org/cat.png",
    "other_host": lambda at: "file://elsewhere/cat.png",
    "base64": lambda at: "data:image/png;base64,a",
    "not_base64": lambda at: "data:image/png;base64,AAAA!AAA=",
    "no_data": lambda at: "data:image/png;base64",
    "wide": lambda at: np.zeros((1, 200_000_000), np.uint8),
    "dtype": lambda at: np.zeros((9, 9, 3)),
    "shape": lambda at: np.zeros((9, 9, 2), np.uint8),
    "kind": lambda at: 7,
}
MESSAGES = {
    "empty": "`image` must be a picture, got '.*', which is empty",
    "text": "`image` must be a picture that Pillow can read, of JPEG, PNG, .*, got '",
    "script": "`image` must be a picture that Pillow can read, of JPEG, PNG, .*, got '",
    "missing": "`image` cannot be read: '.*': No such file",
    "folder": "`image` must be a file",
    "null": "`image` cannot be read: .*null",
    "16_bits": r"`image` must have 8 bits for each colour, got .*I;16",
    "floats": r"`image` must have 8 bits for each colour, got the image with more \(mode F\)",
    "http": "`image` must be a picture, a path or a data URL, got 'https",
    "other_host": "`image` must be a file of this machine",
    "base64": "`image` must be valid base64",
    "not_base64": r"`image` must be valid base64, got 'data:image/png;base64,AAAA!AAA=' \(.*\)$",
    "no_data": "`image` must have data after a comma",
    "wide": "`image` must have at most 178956970 pixels, got 200000000 x 1",
    "dtype": "`image` must be an array of uint8, from 0 to 255, got float64",
    "shape": r"`image` must have the shape .* got \[9, 9, 2\]",
    "kind": "`image` must be a PIL image, a path, .* got int",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_once(case, tmp_path):
    with pytest.raises((TypeError, ValueError), match=MESSAGES[case]) as caught:
        open_picture(REFUSED[case](tmp_path / "file"), "image")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value)


def test_a_bomb_is_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 100)
    Pillow.new("RGB", (99, 99)).save(tmp_path / "bomb.png")
    with pytest.raises(ValueError, match=r"must have at most .*: scale it down"):
        open_picture(tmp_path / "bomb.png", "image")
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 99 * 98)
    with pytest.warns(Pillow.DecompressionBombWarning):
        open_picture(tmp_path / "bomb.png", "image")
    with warnings.catch_warnings(), pytest.raises(ValueError, match="must have at most"):
        warnings.simplefilter("error")  # as under `python -W error`
        open_picture(tmp_path / "bomb.png", "image")


def test_a_file_that_breaks_off(tmp_path):
    """Its header has a size; what is missing is found when it is read."""
    for kind in ("png", "jpg", "gif", "webp"):
        path = tmp_path / f"whole.{kind}"
        Pillow.fromarray(noise(200, 200)).save(path)
        data = path.read_bytes()
        with pytest.raises(ValueError, match=r"`image` cannot be read|that Pillow can read"):
            open_picture(data[: len(data) // 2], "image").read()


@pytest.mark.skipif(not features.check("avif"), reason="Pillow was built without AVIF")
def test_a_file_whose_format_has_errors_of_its_own(tmp_path):
    Pillow.fromarray(noise(40, 40)).save(tmp_path / "a.avif")
    data = (tmp_path / "a.avif").read_bytes()
    open_picture(data, "image").read()
    at = data.index(b"mdat") + 8
    broken = {"item": data.replace(b"av01", b"none"), "pixels": data[:at] + bytes(len(data) - at)}
    with pytest.raises(ValueError, match=r"`image` cannot be read: .*Failed to decode"):
        open_picture(broken["item"], "image")
    with pytest.raises(ValueError, match=r"`image` cannot be read: .*Failed to decode"):
        open_picture(broken["pixels"], "image").read()


def test_a_file_that_changes(tmp_path):
    path = tmp_path / "a.png"
    Pillow.new("RGB", (30, 20)).save(path)
    picture = open_picture(path, "image")
    Pillow.new("RGB", (31, 20)).save(path)
    with pytest.raises(ValueError, match="must keep its size"):
        picture.read()
    assert open_picture(path, "image").source != picture.source


def test_sources(tmp_path):
    """Pictures with the same source are the same, so that they are prepared once."""
    path = tmp_path / "a.png"
    Pillow.new("RGB", (30, 20)).save(path)
    data, array = path.read_bytes(), noise(9, 9)
    assert open_picture(data, "image").source_bytes == len(data)
    for given in (path, str(path), data, array):
        first, second = (open_picture(given, "image").source for _ in range(2))
        assert first == second and hash(first) == hash(second)
    assert open_picture(array, "image").source != open_picture(array.copy(), "image").source
    assert open_picture(Path(path), "image").source == open_picture(path.as_uri(), "image").source
