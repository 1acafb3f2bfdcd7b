"""Arrays on their way to the device."""

import numpy as np
import pytest
import torch

from nanovllm.utils.device import upload

SHAPES = [(1,), (3,), (2, 5), (0,), (4,), (3, 3)]


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-(2**31), 2**31, shape).astype(np.int32) for shape in SHAPES]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_upload(device):
    """Each array arrives in its shape; on a GPU aligned, as kernels assume of their arguments."""
    sent = arrays()
    received = upload(torch.device(device), *sent)
    for array, tensor in zip(sent, received, strict=True):
        assert (tensor.dtype, tensor.device.type) == (torch.int32, device)
        assert tensor.shape == array.shape
        assert tensor.tolist() == array.tolist()
        assert device == "cpu" or tensor.data_ptr() % 16 == 0


def test_one_pinned_copy_holds_all(monkeypatch):
    """The same on a machine without CUDA: the copy stays where it is."""
    empty, made = torch.empty, []

    def unpinned(*args, pin_memory, **kwargs):
        made.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: self)
    sent = arrays()
    received = upload(torch.device("cuda"), *sent)
    assert made == [True]
    assert len({tensor.untyped_storage().data_ptr() for tensor in received}) == 1
    for array, tensor in zip(sent, received, strict=True):
        assert tensor.shape == array.shape
        assert tensor.tolist() == array.tolist()
        assert tensor.storage_offset() % 4 == 0
