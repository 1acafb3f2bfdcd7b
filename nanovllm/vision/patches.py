"""Patches of images, from bytes: normalised and cut on the device."""

import torch


def normalise(
    pixels: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...], scale: float = 1 / 255
) -> torch.Tensor:
    """Pixels as floating-point numbers: (x - mean / scale) / (std / scale).

    The operations and their order are those of transformers' classes on torchvision, which fuse
    scaling and normalisation, so the numbers have the same bits.

    Args:
        pixels: [n, H, W, 3] uint8.
        mean, std: of each colour, of values from 0 to 1.
        scale: factor that makes these of bytes.

    Returns:
        [n, 3, H, W] float32.
    """
    shifts, divisors = (
        torch.tensor(values, dtype=torch.float32, device=pixels.device) * (1.0 / scale)
        for values in (mean, std)
    )
    channels = pixels.permute(0, 3, 1, 2).float()
    return channels.sub_(shifts.view(-1, 1, 1)).div_(divisors.view(-1, 1, 1))


def cut(images: torch.Tensor, size: int, merge: int, frames: int) -> torch.Tensor:
    """Cut images into patches, of which each `merge` x `merge` square's come one after another.

    Args:
        images: [n, 3, H, W], sides multiples of `size` x `merge`.
        size: pixels of a patch's side.
        merge: patches of a square's side.
        frames: number of times that an image is repeated in its patches.

    Returns:
        [n P, 3 x frames x size x size], squares row by row, and so the patches in each.
    """
    n, channels, height, width = images.shape
    square = size * merge
    parts = images.view(
        n, channels, height // square, merge, size, width // square, merge, size
    ).permute(0, 2, 5, 3, 6, 1, 4, 7)  # [n, rows, columns, merge, merge, 3, size, size]
    shape = *parts.shape[:6], frames, size, size
    return parts.unsqueeze(6).expand(shape).reshape(-1, channels * frames * size * size)
