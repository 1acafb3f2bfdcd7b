"""The pool of KV blocks: each layer has its own part, and the device says how many fit."""

import pytest
import torch
from torch import nn

from checkpoints import checkpoint_fixture  # noqa: F401
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.layers.base import Build
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sizing.memory import CPU_TOKENS, GIB, RESERVE

CPU = torch.device("cpu")


@pytest.fixture
def make_pool(checkpoint, model):
    """A pool for a checkpoint of two layers and two KV heads of 32 values."""
    model_config = ModelConfig.from_pretrained(str(checkpoint))

    def make_pool(device=CPU, group=None, **options):
        config = Config(str(checkpoint), kvcache_block_size=16, **options)
        group = group or Group()
        return KVCachePool(model, config, model_config, group, device, torch.float16)

    return make_pool


@pytest.fixture
def model(checkpoint):
    """Its attention layers."""
    config = ModelConfig.from_pretrained(str(checkpoint))
    build = Build(torch.float16, False, Group(), TorchBackend(), 64)
    layers = Qwen3ForCausalLM(config, build).model.layers
    return nn.ModuleList(layer.self_attn.attn for layer in layers)


@pytest.mark.parametrize("size", [1, 2])
def test_each_layer_has_its_part(make_pool, model, size):
    heads = 2 // size
    pool = make_pool(group=Group(0, size))
    assert pool.block_bytes == 2 * 2 * 16 * heads * 32 * 2
    for num_blocks in (1, 5, 3):
        pool.allocate(num_blocks)
        assert pool.tensor.shape == (2, 2, num_blocks, 16, heads, 32)
        assert pool.tensor.dtype == torch.float16
        assert pool.tensor.nbytes == num_blocks * pool.block_bytes
        assert not pool.tensor.any()
        for layer, attention in enumerate(model):
            attention.cache.k.fill_(2 * layer + 1)
            attention.cache.v.fill_(2 * layer + 2)
        found = pool.tensor.flatten(2)
        assert found.amin(2).tolist() == found.amax(2).tolist() == [[1, 3], [2, 4]]
    pool.free()
    assert pool.tensor.numel() == 0
    assert all(part.numel() == 0 for attention in model for part in attention.cache[:2])


def test_a_pool_that_does_not_fit_leaves_none(make_pool, model):
    pool = make_pool()
    pool.allocate(1)
    with pytest.raises((MemoryError, ValueError)):
        pool.allocate(1 << 50)
    assert pool.tensor.numel() == model[0].cache.k.numel() == 0


def test_how_many_fit_a_gpu(make_pool, monkeypatch):
    """What this engine holds now is free for it; its peak, and the reserve, are not."""
    free, total = 30 * GIB + RESERVE, 100 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    pool = make_pool(torch.device("cuda"), gpu_memory_utilization=0.5)
    assert pool.how_many_fit(64, 4 * GIB, 6 * GIB) == 28 * GIB // pool.block_bytes
    assert pool.how_many_fit(64, 4 * GIB, 26 * GIB) == 8 * GIB // pool.block_bytes
    pool = make_pool(torch.device("cuda"), gpu_memory_utilization=0.2)
    assert pool.how_many_fit(64, 4 * GIB, 6 * GIB) == 14 * GIB // pool.block_bytes


def test_options_come_first(make_pool):
    """And otherwise, on a CPU, no more than can ever be in use."""
    assert make_pool(num_kvcache_blocks=7).how_many_fit(64, 0, 0) == 7
    pool = make_pool(kv_cache_memory_bytes=100_000)
    assert pool.how_many_fit(64, 0, 0) == 100_000 // pool.block_bytes
    assert make_pool(max_num_seqs=3).how_many_fit(65, 0, 0) == 3 * 5
    assert make_pool(max_num_seqs=512).how_many_fit(4096, 0, 0) == CPU_TOKENS // 16
    assert make_pool(max_num_seqs=512).how_many_fit(2 * CPU_TOKENS, 0, 0) == CPU_TOKENS // 8
