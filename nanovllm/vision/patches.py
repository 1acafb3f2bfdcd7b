"""Patches of images, from bytes: normalised and cut on the device."""

import torch


def of_bytes(
    values: tuple[float, ...], device: torch.device, scale: float = 1 / 255
) -> torch.Tensor:
    """A number for each colour, of values from 0 to 1, for bytes: [3, 1, 1] float32.

    Args:
        values: the numbers.
        device: torch.device of the result.
        scale: factor by which bytes become values.
    """
    found = torch.tensor(values, dtype=torch.float32) * (1.0 / scale)
    return found.view(-1, 1, 1).to(device)


def normalise(pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Pixels as floating-point numbers: (x - mean) / std.

    The operations and their order are those of transformers' classes on torchvision, which fuse
    scaling and normalisation, so the numbers have the same bits.

    Args:
        pixels: [n, H, W, 3] uint8.
        mean, std: [3, 1, 1] float32, from `of_bytes`.

    Returns:
        [n, 3, H, W] float32.
    """
    return pixels.permute(0, 3, 1, 2).float().sub_(mean).div_(std)


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
