"""The pixels that transformers' processors on torchvision make of an image."""

import numpy as np
import pytest

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 40_000, "shortest_edge": 2_000},
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GEMMA = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 48, "width": 48},
    "resample": 2,
    "do_convert_rgb": True,
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def processor(raw):
    """A processor of transformers, of the class that needs torchvision."""
    pytest.importorskip("torchvision", reason="torchvision is the reference")
    from transformers import Gemma3ImageProcessor, Qwen2VLImageProcessor

    kind = Qwen2VLImageProcessor if raw is QWEN else Gemma3ImageProcessor
    return kind(**{key: value for key, value in raw.items() if key != "image_processor_type"})


def pixels(raw, image):
    """Its bytes of an image, resized: [H, W, 3]."""
    made = processor(raw)(image, do_rescale=False, do_normalize=False, return_tensors="pt")
    values = made["pixel_values"].numpy()
    if raw is GEMMA:
        return values[0].transpose(1, 2, 0)
    size, merge = raw["patch_size"], raw["merge_size"]
    _, rows, columns = made["image_grid_thw"][0].tolist()
    parts = values.reshape(rows // merge, columns // merge, merge, merge, 3, 2, size, size)
    np.testing.assert_array_equal(parts[..., 0, :, :], parts[..., 1, :, :])
    whole = parts[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return whole.reshape(rows * size, columns * size, 3)
