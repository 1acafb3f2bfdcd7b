"""Devices of a replica."""

import pytest
import torch

from nanovllm.utils.device import device_shares


@pytest.fixture(autouse=True)
def four_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(
    ("visible", "size", "shares"),
    [
        (None, 1, ["0", "1"]),
        (None, 2, ["0,1", "2,3"]),
        ("3,1,0,2", 2, ["3,1", "0,2"]),
        ("GPU-a, GPU-b ,GPU-c,GPU-d", 1, ["GPU-a", "GPU-b"]),
    ],
)
def test_each_replica_has_its_own(visible, size, shares, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_shares("cuda", 2, size) == [{"CUDA_VISIBLE_DEVICES": each} for each in shares]


def test_a_cpu_is_for_all():
    assert device_shares("cpu", 3, 2) == [{}, {}, {}]


def test_there_must_be_enough(monkeypatch):
    with pytest.raises(ValueError, match=r"`data_parallel_size` must be at most .* 4, got 5"):
        device_shares("cuda", 5, 1)
    with pytest.raises(ValueError, match=r"`data_parallel_size \* tensor_parallel_size` .* got 6"):
        device_shares("auto", 3, 2)
    with pytest.raises(ValueError, match="have no index with data_parallel_size 2"):
        device_shares("cuda:1", 2, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # after PyTorch has looked
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES must name a device"):
        device_shares("cuda", 3, 1)
