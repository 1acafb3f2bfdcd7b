"""Adapters that are loaded into an engine that runs, and unloaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from new_weights import results
from peft_adapters import make_adapter, tensors_of

from checkpoints import SMALL, make_checkpoint, rare
from nanovllm import LLM
from nanovllm.checkpoint.files import ADAPTER
from nanovllm.layers.weights import onednn

OPTIONS: dict[str, Any] = {**SMALL, "num_kvcache_blocks": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("adapters")
    return [make_adapter(base, path / name, seed=ord(name)) for name in "ab"]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "fp8"}, {"tensor_parallel_size": 2}, rare({"data_parallel_size": 2})],
)
def test_weights_are_those_of_an_engine_with_the_adapter(
    options: dict[str, Any], base: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: from its directory, from memory, one after the other, and without any."""
    monkeypatch.setattr(onednn, "MIN_WEIGHT", 0)
    options = {**OPTIONS, **options}
    wanted = []
    for adapter in (None, *adapters):
        with LLM(base, adapter=adapter, **options) as fresh:
            wanted.append(results(fresh))
    plain, *merged = wanted
    assert plain != merged[0] != merged[1] != plain
    a, b = adapters
    in_memory = json.loads((b / ADAPTER).read_text("utf-8")), tensors_of(b)
    with LLM(base, adapter=a, **options) as llm:
        assert results(llm) == merged[0] and llm.metrics()["adapter"] == "a"
        for given, found, name in ((in_memory, merged[1], "in memory"), (a, merged[0], "a")):
            llm.load_adapter(given)
            assert results(llm) == found and llm.metrics()["adapter"] == name
        llm.unload_adapter()
        assert results(llm) == plain and llm.metrics()["adapter"] == "none"
        assert llm.weight_version == 3


def test_what_cannot_be_merged_leaves_the_engine_as_it_is(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    a, _ = adapters
    config = json.loads((a / ADAPTER).read_text("utf-8"))
    tensors = tensors_of(a)
    name = next(iter(tensors))
    half = {key: tensor for key, tensor in tensors.items() if key != name}
    with LLM(base, adapter=a, **OPTIONS) as llm:
        before = results(llm)
        for given, error in (
            (tmp_path, "has no adapter_config.json"),
            ((config, half), "in memory"),
            ((config | {"bias": "all"}, tensors), "bias"),
        ):
            with pytest.raises(ValueError, match=error):
                llm.load_adapter(given)
        with pytest.raises(TypeError, match="or a pair of a configuration and tensors, got int"):
            llm.load_adapter(1)
        llm.add_request([1, 2, 3])
        for use in (lambda: llm.load_adapter(a), llm.unload_adapter):
            with pytest.raises(RuntimeError, match="while requests are left"):
                use()
        llm.abort_all()
        llm.reset_prefix_cache()
        assert results(llm) == before and llm.weight_version == 0
    with (
        LLM(base, load_format="dummy", **OPTIONS) as dummy,
        pytest.raises(ValueError, match="which load_format='dummy' does not read"),
    ):
        dummy.load_adapter(a)
