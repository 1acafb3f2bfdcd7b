"""The pool: each layer has its own part, and the device says how many blocks fit."""

import random

import pytest
import torch
from host import make_seq
from torch import nn

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.layers.base import Build, Per, State, StatefulLayer
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sizing import memory
from nanovllm.sizing.activations import max_activations
from nanovllm.sizing.memory import CPU_TOKENS, GIB, RESERVE
from nanovllm.tensors.fp8 import FP8
from nanovllm.windows.pages import BlockKind
from nanovllm.windows.places import divide_pages
from nanovllm.windows.sliding_blocks import make_block_manager

CPU = torch.device("cpu")


def attentions(checkpoint, group=None, dtype=torch.float16, cache_dtype=None) -> nn.ModuleList:
    """The attention layers of a checkpoint of two layers and two KV heads of 32 values."""
    config = ModelConfig.from_pretrained(str(checkpoint))
    build = Build(dtype, False, group or Group(), TorchBackend(), 64, 16, cache_dtype)
    layers = Qwen3ForCausalLM(config, build).model.layers
    return nn.ModuleList(layer.self_attn.attn for layer in layers)


@pytest.fixture
def make_pool(checkpoint):
    """A pool for these, or other layers."""

    def make_pool(model=None, device=CPU, **options):
        config = Config(str(checkpoint), kvcache_block_size=16, **options)
        model = attentions(checkpoint) if model is None else model
        return KVCachePool(model, config, Group(), device)

    return make_pool


@pytest.mark.parametrize(
    ("size", "cache_dtype", "head_bytes"), [(1, None, 64), (2, None, 64), (2, FP8, 33)]
)
def test_each_layer_has_its_part(checkpoint, make_pool, size, cache_dtype, head_bytes):
    """Parts of their own, full of zeros, whatever was there before."""
    model, heads = attentions(checkpoint, Group(0, size), cache_dtype=cache_dtype), 2 // size
    pool = make_pool(model)
    assert pool.block_bytes == 2 * 2 * 16 * heads * head_bytes
    for num_blocks in (1, 5, 3):
        pool.allocate(num_blocks)
        caches = [layer.cache for layer in model]
        parts = [part for cache in caches for part in cache if part is not None]
        for cache in caches:
            assert cache.k.shape == cache.v.shape == (num_blocks, 16, heads, 32)
            assert cache.k.dtype == (cache_dtype or torch.float16)
            assert (cache.k_exponents is None) == (cache_dtype is None)
        assert sum(part.nbytes for part in parts) == pool.num_blocks * pool.block_bytes
        assert not any(part.view(torch.uint8).any() for part in parts)
        for i, part in enumerate(parts):
            part.view(torch.uint8).fill_(i + 1)
        assert [part.view(torch.uint8).unique().tolist() for part in parts] == [
            [i + 1] for i in range(len(parts))
        ]
    pool.free()
    assert pool.num_blocks == 0
    assert all(part.numel() == 0 for layer in model for part in layer.cache if part is not None)


class Recurrent(StatefulLayer):
    """Keeps two tensors of each sequence."""

    def states(self):
        last = State((3, 5), torch.float16, Per.SEQUENCE)
        return {"last": last, "sums": State((7,), torch.float32, Per.SEQUENCE)}

    def bind(self, **tensors):
        self.kept = tensors


def test_a_layer_keeps_what_it_declares(checkpoint, make_pool, monkeypatch):
    """States of sequences and of blocks; the number of blocks that fit counts both."""
    model = nn.ModuleList([Recurrent(), *attentions(checkpoint), Recurrent()])
    pool, plain = make_pool(model, max_num_seqs=3), make_pool(max_num_seqs=3)
    assert pool.sequence_bytes == 2 * (15 * 2 + 7 * 4) and not plain.sequence_bytes
    assert pool.block_bytes == plain.block_bytes
    pool.allocate(2)
    for i, layer in enumerate((model[0], model[-1])):
        assert layer.kept["last"].shape == (4, 3, 5) and layer.kept["sums"].shape == (4, 7)
        assert layer.kept["sums"].dtype == torch.float32
        layer.kept["last"].fill_(i + 1)
        layer.kept["sums"].fill_(i + 3)
    assert [float(x.mean()) for x in (*model[0].kept.values(), *model[-1].kept.values())] == [
        *(1, 3, 2, 4)
    ]
    assert not model[1].cache.k.any() and len(model[1].cache.k) == 2
    monkeypatch.setattr(memory, "available_cpu_memory", lambda: 2000 * pool.block_bytes)
    options = {"max_num_seqs": 512, "enable_prefix_caching": True}
    with_states, without = make_pool(model, **options), make_pool(**options)
    states = 513 * pool.sequence_bytes
    assert without.how_many_fit(64, 0, 0) == 1000
    assert with_states.how_many_fit(64, 0, 0) == (2000 * pool.block_bytes - states) // (
        2 * pool.block_bytes
    )


WHOLE, SLIDING = State((16, 2), torch.float16), State((16, 2), torch.float16, window=20)


@pytest.mark.parametrize(
    ("pattern", "kinds", "num_places"),
    [
        ("wwww", [(0, 1)], 4),
        ("sss", [(20, 1)], 3),
        ("wsws", [(0, 1), (20, 1)], 2),
        ("sssws", [(0, 1), (20, 4)], 1),
        ("wwswww", [(0, 5), (20, 1)], 1),
        (5 * "sssssw" + "ssss", [(0, 1), (20, 6)], 5),  # Gemma 3 4B: one place of 35 stays empty
        (10 * "sssssw" + "ss", [(0, 1), (20, 5)], 11),  # 27B: a place of 11 in blocks, 3 in parts
        ("www.", [(0, 1)], 3),
    ],
)
def test_pages_have_places_for_layers(pattern, kinds, num_places):
    """Whole and sliding layers, and one without blocks: no two share a place and a page."""
    states = {"w": {"k": WHOLE}, "s": {"k": SLIDING}, ".": {}}
    plan = divide_pages([states[letter] for letter in pattern])
    assert [tuple(kind) for kind in plan.kinds] == kinds
    assert plan.num_places == num_places
    assert [where is None for where in plan.places] == [letter == "." for letter in pattern]
    for letter, (_, pages) in zip("ws", (kinds[0], kinds[-1]), strict=True):
        found = [where for where, x in zip(plan.places, pattern, strict=True) if x == letter]
        assert len(set(found)) == len(found)
        assert all(where[0] < num_places and where[1] < pages for where in found if where)


def test_a_layer_slides_if_all_that_it_keeps_does():
    partly = {"k": SLIDING, "v": WHOLE}
    assert divide_pages([partly, {"v": WHOLE, "k": WHOLE}]).kinds == (BlockKind(),)
    found = divide_pages([{"k": SLIDING, "v": SLIDING}, {"v": WHOLE, "k": WHOLE}])
    assert found.kinds == (BlockKind(), BlockKind(20))
    wider = {"k": SLIDING._replace(window=30), "v": SLIDING}
    assert divide_pages([wider, {"k": SLIDING, "v": SLIDING}]).kinds == (BlockKind(30),)


def test_layers_of_other_shapes_share_no_pages():
    plan = divide_pages([{"k": WHOLE}, {"k": SLIDING._replace(shape=(16, 4))}])
    assert plan.kinds == (BlockKind(),) and plan.num_places == 2


def layers_like(pattern, checkpoint, cache_dtype=None):
    """Attention layers that see all tokens ("w"), or slide over 20 ("s")."""
    model = nn.ModuleList(attentions(checkpoint, cache_dtype=cache_dtype)[0] for _ in pattern)
    for layer, letter in zip(model, pattern, strict=True):
        layer.scoring = layer.scoring._replace(window=20 if letter == "s" else 0)
    return model


@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("pattern", ["sws", "ssswsss", "wsww"])
def test_blocks_of_layers_that_slide_lie_beside_others(pattern, cache_dtype, checkpoint, make_pool):
    """Sequences fill a pool; each writes its blocks in all layers, and finds them again."""
    model = layers_like(pattern, checkpoint, cache_dtype)
    pool = make_pool(model)
    pool.allocate(13)
    manager = make_block_manager(13, 16, True, pool.kinds)
    rng, written, value = random.Random(1), [], 0
    while manager.can_allocate(seq := make_seq(rng.randint(1, 60), block_size=16)):
        manager.allocate(seq)
        for layer, letter in zip(model, pattern, strict=True):
            table = seq.kv.window_table if letter == "s" else seq.kv.table
            for block_id in table:
                for part in filter(None.__ne__, layer.cache):
                    value = value % 250 + 1
                    part[block_id].view(torch.uint8).fill_(value)
                    written.append((part[block_id].view(torch.uint8), value))
    assert len(written) > 13 * len(pattern)
    for part, wanted in written:
        assert part.unique().tolist() == [wanted]


def test_the_longest_sequence_has_a_window_in_layers_that_slide(checkpoint, make_pool):
    """One layer of four sees all tokens: 6,048 fit, where all layers would hold 1,600."""
    model = layers_like("wsss", checkpoint)
    pool = make_pool(model, max_num_batched_tokens=64, max_num_seqs=4)
    most = pool.max_tokens(100)
    # 134 slabs of 3 pages: 8 for layers that slide, and the rest for the other.
    assert most == (134 - 8) * 3 * 16
    assert pool.max_tokens(8) == 8 * 16


def test_memory_of_two_kinds_is_within_limits(checkpoint, make_pool, monkeypatch, caplog):
    """Pages are whole slabs; the log counts sequences by what their layers keep."""
    model = layers_like("wsssss", checkpoint)
    for limit in range(30, 90):
        pool = make_pool(model, kv_cache_memory_bytes=limit * make_pool(model)._page_bytes)
        num_blocks = pool.how_many_fit(64, 0, 0)
        assert num_blocks == 1 or pool.num_bytes(num_blocks) <= limit * pool._page_bytes
        assert pool.num_bytes(num_blocks + 2) > limit * pool._page_bytes
    free = 30 * GIB + RESERVE
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100 * GIB))
    pool = make_pool(model, device=torch.device("cuda"), gpu_memory_utilization=0.9)
    assert (
        30 * GIB - 12 * pool._page_bytes < pool.num_bytes(pool.how_many_fit(64, 0, 0)) <= 30 * GIB
    )
    pool = make_pool(model)
    pool.allocate(50)
    with caplog.at_level("INFO", logger="nanovllm"):
        pool.log(800)  # 50 blocks: a page each, and 3 parts of 5 pages
    assert f"{60 * 5 / (50 + 3 * 5):.1f} sequences of 800 tokens at once" in caplog.text


def test_states_are_counted_once_and_rehearsed_by_a_row(checkpoint, make_pool, monkeypatch):
    """On a GPU: those of 512 sequences beside the weights would not fit before they are sized."""
    model = nn.ModuleList([Recurrent(), *attentions(checkpoint)])
    pool, rows = make_pool(model, max_num_seqs=512), []
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 40)
    config = Config(str(checkpoint), kvcache_block_size=16)

    def compute(inputs):
        rows.append(len(model[0].kept["sums"]))
        assert not inputs.context.slots.any(), "and reads no other"

    assert max_activations(compute, pool, config, 64, CPU, 0) == 60
    assert rows == [1, 1] and not len(model[0].kept["sums"])
    pool.allocate(1)
    assert len(model[0].kept["sums"]) == 513
    assert pool.num_bytes(1) == pool.block_bytes + 513 * pool.sequence_bytes


def test_layers_without_states_are_left_alone(checkpoint, make_pool):
    """One that reads another's cache, say."""

    class Reader(Recurrent):
        def states(self):
            return {}

        def bind(self, **tensors):
            raise AssertionError("nothing to bind")

    pool = make_pool(nn.ModuleList([Reader(), *attentions(checkpoint)]))
    pool.allocate(2)
    pool.free()


def test_a_pool_that_does_not_fit_leaves_none(checkpoint, make_pool):
    model = attentions(checkpoint)
    pool = make_pool(model)
    pool.allocate(1)
    with pytest.raises((MemoryError, ValueError)):
        pool.allocate(1 << 50)
    assert pool.num_blocks == model[0].cache.k.numel() == 0


def test_how_many_fit_a_gpu(make_pool, monkeypatch):
    """Memory that this engine holds now is free for it; its peak, and the reserve, are not."""
    free, total = 30 * GIB + RESERVE, 100 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    pool = make_pool(device=torch.device("cuda"), gpu_memory_utilization=0.5)
    assert pool.how_many_fit(64, 4 * GIB, 6 * GIB) == 28 * GIB // pool.block_bytes
    assert pool.how_many_fit(64, 4 * GIB, 26 * GIB) == 8 * GIB // pool.block_bytes
    pool = make_pool(device=torch.device("cuda"), gpu_memory_utilization=0.2)
    assert pool.how_many_fit(64, 4 * GIB, 6 * GIB) == 14 * GIB // pool.block_bytes


def test_options_come_first(make_pool):
    """And otherwise, on a CPU, no more than can ever be in use."""
    assert make_pool(num_kvcache_blocks=7).how_many_fit(64, 0, 0) == 7
    pool = make_pool(kv_cache_memory_bytes=100_000)
    assert pool.how_many_fit(64, 0, 0) == 100_000 // pool.block_bytes
    assert make_pool(max_num_seqs=3).how_many_fit(65, 0, 0) == 3 * 5
    assert make_pool(max_num_seqs=512).how_many_fit(4096, 0, 0) == CPU_TOKENS // 16
    assert make_pool(max_num_seqs=512).how_many_fit(2 * CPU_TOKENS, 0, 0) == CPU_TOKENS // 8
