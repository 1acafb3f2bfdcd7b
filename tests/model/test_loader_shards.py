"""Weights of a model that is split: each rank reads its part of every tensor, and no more."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from safetensors.torch import load_file, save_file

from checkpoints import copy_checkpoint, make_checkpoint
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.checkpoint.fp8 import Fp8
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import WHILE_LOADING, Quantization
from nanovllm.distributed.group import Group
from nanovllm.layers.base import Build
from nanovllm.layers.weights import fp8 as fp8_weight
from nanovllm.layers.weights.int8_head import Int8Head
from nanovllm.models import loader
from nanovllm.models.loader import checkpoint_shards, load_dummy, load_model
from nanovllm.models.qwen3 import Qwen3ForCausalLM

HEADS = 8
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {"num_key_value_heads": 8},
    "odd": {  # the last ranks have no tokens, and up to eight ranks share a KV head
        "num_key_value_heads": 1,
        "vocab_size": 131,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "shard": "60KB",
    },
    "two KV heads": {"num_key_value_heads": 2, "vocab_size": 180, "attention_bias": True},
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"num_attention_heads": HEADS, "head_dim": 16, **CHECKPOINTS[request.param]}
    return make_checkpoint(tmp_path_factory.mktemp("shards") / "model", seed=5, **options)


def build(path: Path, rank: int, size: int, **options: Any) -> Qwen3ForCausalLM:
    """The model of a rank. Its weights are NaN, or 99 if they are integers: what is not filled
    shows.
    """
    how = Build(torch.float32, False, Group(rank, size), TorchBackend(), 64)
    model = Qwen3ForCausalLM(ModelConfig.from_pretrained(str(path)), how._replace(**options))
    for param in model.parameters():
        param.data.fill_(torch.nan if param.dtype.is_floating_point else 99)
    return model


def held(name: str, tensor: torch.Tensor, rank: int, size: int, kv_heads: int) -> torch.Tensor:
    """Shard of a tensor that a rank must hold; for the vocabulary's, see the test."""
    module, kind = name.split(".")[-2:]
    if module in ("q_proj", "gate_proj", "up_proj"):
        return tensor.chunk(size)[rank]
    if module in ("k_proj", "v_proj"):
        repeats = max(1, size // kv_heads)  # ranks that share a head
        return tensor.chunk(size // repeats)[rank // repeats]
    if module in ("o_proj", "down_proj") and kind == "weight":
        return tensor.chunk(size, dim=1)[rank]
    return tensor


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_ranks_parts_make_the_checkpoint(path: Path, size: int) -> None:
    """A rank with somebody else's rows gives fluent nonsense, and no error."""
    saved = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    kv_heads = ModelConfig.from_pretrained(str(path)).num_key_value_heads
    models = [build(path, rank, size) for rank in range(size)]
    for model in models:
        load_model(model, path)
    parts = [checkpoint_shards(model) for model in models]
    assert all(set(shards) == set(saved) for shards in parts)
    for name, tensor in saved.items():
        targets = [shards[name].target for shards in parts]
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert torch.equal(torch.cat(targets), tensor), name
            assert [len(target) for target in targets] == [len(m.lm_head.vocab) for m in models]
            continue
        for rank, target in enumerate(targets):
            assert torch.equal(target, held(name, tensor, rank, size, kv_heads)), (name, rank)
    for model in models:
        if len(model.lm_head.vocab):
            assert all(param.isfinite().all() for param in model.parameters())
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == ("lm_head.weight" not in saved)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_heads_in_int8_are_of_the_same_numbers(
    path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are tied or not, and however many ranks divide them. Codes are the nearest, the
    scale a row's own; embeddings stay as they are.
    """
    pytest.importorskip("triton")
    monkeypatch.setattr(fp8_weight, "PART", 500)  # several parts of rows
    saved = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    embedding = saved["model.embed_tokens.weight"].half().to(DEVICE)
    numbers = saved.get("lm_head.weight", saved["model.embed_tokens.weight"]).double().to(DEVICE)
    how = {"dtype": torch.float16, "fused": True, "quantization": WHILE_LOADING}
    with torch.device(DEVICE):  # where kernels run
        models = [build(path, rank, size, **how) for rank in range(size)]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, numbers.shape[1], generator=generator).half().to(DEVICE)
    codes, scales, embedded, logits = [], [], [], []
    for model in models:
        load_model(model, path)
        count, weight = len(model.lm_head.vocab), model.lm_head.weight
        assert isinstance(weight, Int8Head)
        assert sum(p is weight.data for p in model.parameters()) == 1
        codes.append(weight.data[:count])
        scales.append(weight.scales[:count].double())
        embedded.append(model.model.embed_tokens.weight.data[:count])
        logits.append(model.compute_logits(x))
    assert torch.equal(torch.cat(embedded), embedding)
    torch.testing.assert_close(torch.cat(scales), numbers.abs().amax(1, keepdim=True) / 127)
    held = torch.cat(codes) * torch.cat(scales)
    assert ((held - numbers).abs() <= torch.cat(scales) * 0.5001).all()
    torch.testing.assert_close(
        torch.cat(logits, 1).double(), x.double() @ held.T, rtol=2e-3, atol=2e-3
    )


@pytest.mark.parametrize(
    ("other", "in_int8"),
    [
        ({}, True),
        ({"quantization": None}, False),
        ({"quantization": Quantization(Fp8((128, 128), "weight_scale_inv"), "fp8")}, False),
        ({"quantization": Quantization(Fp8((1, 0), "weight_scale"), "compressed-tensors")}, False),
        ({"dtype": torch.float32}, False),
        ({"fused": False}, False),
    ],
    ids=str,
)
def test_which_heads_are_in_int8(other: dict[str, Any], in_int8: bool, path: Path) -> None:
    """Heads of models that are quantised while they are loaded, where our kernels multiply."""
    pytest.importorskip("triton")
    how = {"dtype": torch.float16, "fused": True, "quantization": WHILE_LOADING}
    head = build(path, 0, 1, **how | other).lm_head
    assert isinstance(head.weight, Int8Head) == in_int8


class Watch:
    """Stands for an open safetensors file, and counts what is read."""

    def __init__(self, tensors: Any, read: dict[str, int]) -> None:
        self.tensors, self.read = tensors, read

    def keys(self) -> list[str]:
        return self.tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is read as a whole")

    def get_slice(self, name: str) -> "WatchedSlice":
        return WatchedSlice(self.tensors.get_slice(name), name, self.read)


class WatchedSlice:
    """Stands for `get_slice`."""

    def __init__(self, source: Any, name: str, read: dict[str, int]) -> None:
        self.source, self.name, self.read = source, name, read

    def get_shape(self) -> list[int]:
        return self.source.get_shape()

    def get_dtype(self) -> str:
        return self.source.get_dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        tensor = self.source[key]
        assert self.name not in self.read, "read twice"
        self.read[self.name] = tensor.numel()
        return tensor


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_rank_reads_its_part_only(path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks that each read the whole of a large checkpoint would take eight times as long,
    and its memory eight times.
    """
    whole = 0
    for file in path.glob("*.safetensors"):
        whole += sum(tensor.numel() for tensor in load_file(file).values())
    read: dict[str, int] = {}
    original = loader.safe_open

    @contextmanager
    def safe_open(*args: Any, **kwargs: Any) -> Iterator[Watch]:
        with original(*args, **kwargs) as tensors:
            yield Watch(tensors, read)

    monkeypatch.setattr(loader, "safe_open", safe_open)
    for rank in range(size):
        read.clear()
        model = build(path, rank, size)
        load_model(model, path)
        shards = checkpoint_shards(model)
        assert read == {name: shard.target.numel() for name, shard in shards.items()}
        assert sum(read.values()) <= {1: 1, 2: 0.55, 8: 0.2}[size] * whole


@pytest.mark.parametrize(("name", "dim"), [("q_proj", 0), ("k_proj", 0), ("o_proj", 1)])
@pytest.mark.parametrize("size", [1, 4])
def test_a_tensor_of_another_size_is_refused_by_every_rank(
    path: Path, size: int, name: str, dim: int, tmp_path: Path
) -> None:
    """It has room for a rank's part, so only its whole shape tells that the model is another."""
    copy = copy_checkpoint(path, tmp_path / "model")
    full = f"model.layers.0.self_attn.{name}.weight"
    for file in copy.glob("*.safetensors"):
        if full in (tensors := load_file(file)):
            save_file({**tensors, full: torch.cat([tensors[full]] * 2, dim)}, file)
    for rank in range(size):
        with pytest.raises(ValueError, match=f"{full} has shape .*, but config.json implies"):
            load_model(build(copy, rank, size), copy)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_dummy_weights_are_those_of_one_rank(path: Path, size: int) -> None:
    """A benchmark on two GPUs must run the model that it runs on one."""
    single = build(path, 0, 1)
    load_dummy(single, seed=3)
    wanted = {name: shard.target for name, shard in checkpoint_shards(single).items()}
    kv_heads = ModelConfig.from_pretrained(str(path)).num_key_value_heads
    models = [build(path, rank, size) for rank in range(size)]
    for model in models:
        load_dummy(model, seed=3)
    parts = [checkpoint_shards(model) for model in models]
    for name, tensor in wanted.items():
        targets = [shards[name].target for shards in parts]
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert torch.equal(torch.cat(targets), tensor), name
            continue
        for rank, target in enumerate(targets):
            assert torch.equal(target, held(name, tensor, rank, size, kv_heads)), (name, rank)
    another = build(path, 0, size)
    load_dummy(another, seed=4)
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(checkpoint_shards(another)[name].target, parts[0][name].target)
