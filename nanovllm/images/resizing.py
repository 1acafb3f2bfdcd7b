"""Resizing with the bits of torchvision, in threads."""

import platform

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray


def resize(pixels: NDArray[np.uint8], height: int, width: int, filter: str) -> NDArray[np.uint8]:
    """Resize a picture, with antialiasing.

    The bits are those of `torchvision.transforms.v2.functional.resize` of tensors on a CPU, which
    calls the same function: on bytes, or where it has no fast kernel for bilinear ones on floats.

    Args:
        pixels: [H, W, 3] uint8.
        height, width: size of the result.
        filter: "bicubic" or "bilinear".

    Returns:
        [height, width, 3] uint8.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    # Pillow's are not writeable, of which PyTorch would warn; mirrored ones it refuses.
    if not pixels.flags.writeable or min(pixels.strides) < 0:
        pixels = pixels.copy()
    # [1, 3, H, W], colours innermost: PyTorch needs no copies then, nor threads of its own.
    image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    in_floats = filter == "bilinear" and not _has_bilinear_integers()
    found = F.interpolate(
        image.float() if in_floats else image,
        size=[height, width],
        mode=filter,
        align_corners=False,
        antialias=True,
    )
    if in_floats:
        found = found.round_().to(torch.uint8)
    return np.ascontiguousarray(found[0].permute(1, 2, 0).numpy())


def _has_bilinear_integers() -> bool:
    """Whether torchvision resizes bytes bilinearly as such (`_do_native_uint8_resize_on_cpu`)."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability in ("AVX2", "AVX512") or platform.machine() in ("aarch64", "arm64")
