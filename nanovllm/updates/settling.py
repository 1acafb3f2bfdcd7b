"""Parameters and other tensors move to pieces of memory, whose addresses outlast it."""

import torch
from torch import nn

from nanovllm.device_memory.pieces import Piece
from nanovllm.utils.device import capturing

SMALL = 1 << 20  # bytes of a parameter up to which it shares a piece with others
PIECE_BYTES = 64 << 20  # of small ones together
CACHED_BYTES = 1 << 30  # that PyTorch may keep of parameters that have moved
ALIGNMENT = 256  # bytes, at multiples of which parameters begin


def settle(model: nn.Module, device: torch.device) -> list[Piece]:
    """Move the parameters of a model, with their values, to pieces. Those in oneDNN's layout, which
    PyTorch alone can make, stay.
    """
    by_storage: dict[int, list[nn.Parameter]] = {}
    for param in model.parameters():
        if not param.is_mkldnn:
            by_storage.setdefault(param.untyped_storage().data_ptr(), []).append(param)
    pieces, moved = [], 0
    for together in _in_pieces(list(by_storage.values())):
        sizes = [_room(params[0]) for params in together]
        pieces.append(piece := Piece(sum(sizes), device))
        for params, part in zip(together, piece.bytes.split(sizes), strict=True):
            _move(params, part)
        moved += sum(sizes)
        if moved > CACHED_BYTES and device.type == "cuda":
            with capturing:
                torch.cuda.empty_cache()  # the next pieces may need what it has kept
            moved = 0
    return pieces


def _in_pieces(storages: list[list[nn.Parameter]]) -> list[list[list[nn.Parameter]]]:
    """The parameters of each piece, by storage: a large one alone, small ones together."""
    pieces: list[list[list[nn.Parameter]]] = []
    small: list[list[nn.Parameter]] = []
    for params in storages:
        if _room(params[0]) > SMALL:
            pieces.append([params])
        else:
            small.append(params)
    per_piece = max(1, PIECE_BYTES // SMALL)
    return pieces + [small[i : i + per_piece] for i in range(0, len(small), per_piece)]


def _room(param: nn.Parameter) -> int:
    """Bytes that a parameter's storage takes of a piece."""
    return -(-param.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT


def _move(params: list[nn.Parameter], part: torch.Tensor) -> None:
    """Have parameters of one storage in `part`, bytes of a piece."""
    storage = params[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=part.device).set_(storage)
    part[: len(whole)].copy_(whole)
    for param in params:
        places = part.view(param.dtype)
        begin = places.storage_offset() + param.storage_offset()
        param.data = places.as_strided(param.size(), param.stride(), begin)


def move(tensor: torch.Tensor) -> tuple[torch.Tensor, Piece]:
    """A tensor of the same shape, all zero, that is a piece; and the piece."""
    piece = Piece(tensor.nbytes, tensor.device)
    return piece.bytes.view(tensor.dtype).view(tensor.shape), piece
