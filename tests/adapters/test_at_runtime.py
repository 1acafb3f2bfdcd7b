"""Adapters that are loaded into an engine that runs, and unloaded."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from new_weights import results
from peft import LoraConfig, PeftModel
from peft_adapters import make_adapter, tensors_of
from transformers import AutoModelForCausalLM

from checkpoints import SMALL, copy_checkpoint, make_checkpoint, rare
from nanovllm import LLM
from nanovllm.checkpoint.files import ADAPTER
from nanovllm.layers.weights import onednn
from nanovllm.updates import weights

OF_PEFT = r"pass \(model.peft_config\['default'\], peft.get_peft_model_state_dict\(model\)\)$"

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
    [
        {},
        {"quantization": "fp8"},
        {"tensor_parallel_size": 2},
        rare({"data_parallel_size": 2, "batch_invariant": True}),  # the bits of one engine
    ],
)
def test_weights_are_those_of_an_engine_with_the_adapter(
    options: dict[str, Any], base: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: from its directory, from memory, one after the other, and without any."""
    if "data_parallel_size" not in options:  # of this process alone
        monkeypatch.setattr(onednn, "MIN_WEIGHT", 0)
    options = {**OPTIONS, **options}
    one = {**options, "data_parallel_size": 1}
    wanted = []
    for adapter in (None, *adapters):
        with LLM(base, adapter=adapter, **one) as fresh:
            wanted.append(results(fresh))
    plain, *merged = wanted
    assert plain != merged[0] != merged[1] != plain
    a, b = adapters
    in_memory = LoraConfig.from_pretrained(b), tensors_of(b)
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
    peft_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), a)
    with LLM(base, adapter=a, **OPTIONS) as llm:
        before = results(llm)
        for given, error in (
            (tmp_path, "has no adapter_config.json"),
            ([a, tmp_path], "has no adapter_config.json"),
            ([], r"at least one adapter, got none: unload_adapter\(\) leaves none"),
            ((config, half), "in memory"),
            ((config | {"bias": "all"}, tensors), "bias"),
            ((config, tensors | {name: tensors[name].to("meta")}), f"{name} has no values"),
            ((config, tensors | {name: tensors[name] * math.nan}), f"tensor {name} has NaN or"),
            ((config, tensors | {name: tensors[name].to_sparse()}), r"pass tensor.to_dense\(\)"),
        ):
            with pytest.raises(ValueError, match=error):
                llm.load_adapter(given)
        for wrong, error in (
            (1, "a pair of a configuration and tensors, or a list of these, got int"),
            ((1, 2, 3), "tensors, or a list of these, got 3 values"),
            ([a, 1], "or a list of these, got int"),
            ((1, tensors), "must be a LoraConfig, or the object in adapter_config.json, got int"),
            ((config, [*tensors.items()]), "must be a dictionary, as .* returns it, got list"),
            ((config, {"a": 1}), "must be torch.Tensors by their names, got 'a': int"),
            (tensors, rf"got dict: {OF_PEFT}"),
            (peft_model, rf"got PeftModelForCausalLM: {OF_PEFT}"),
            ((peft_model.peft_config, tensors), rf"a dictionary of 'default': {OF_PEFT}"),
        ):
            with pytest.raises(TypeError, match=error):
                llm.load_adapter(wrong)
        llm.add_request([1, 2, 3])
        for use in (lambda: llm.load_adapter(a), llm.unload_adapter):
            with pytest.raises(RuntimeError, match="while requests are left"):
                use()
        llm.abort_all()
        llm.reset_prefix_cache()
        assert results(llm) == before and llm.weight_version == 0
    with (
        LLM(base, load_format="dummy", **OPTIONS) as dummy,
        pytest.raises(ValueError, match="load_format='dummy' reads no checkpoint"),
    ):
        dummy.load_adapter(a)


class Directory:
    """A path of another class than pathlib's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_several_adapters_are_those_of_an_engine_with_them(
    base: Path, adapters: list[Path]
) -> None:
    """Bit for bit, in their order; a pair of paths is no configuration with tensors."""
    a, b = adapters
    with LLM(base, adapter=[a, b], **OPTIONS) as fresh:
        wanted = results(fresh)
    in_memory = LoraConfig.from_pretrained(b), tensors_of(b)
    with LLM(base, **OPTIONS) as llm:
        for given, names in (
            ([a, str(b)], "a, b"),
            ((Directory(a), b), "a, b"),
            ([Directory(a), in_memory], "a, in memory"),
        ):
            llm.load_adapter(given)
            assert results(llm) == wanted and llm.metrics()["adapter"] == names
            llm.load_adapter(Directory(b))
            assert results(llm) != wanted and llm.metrics()["adapter"] == "b"


@pytest.mark.parametrize("options", [{}, rare({"tensor_parallel_size": 2})])
def test_paths_hold_in_another_directory_and_files_that_are_gone_change_nothing(
    options: dict[str, int],
    base: Path,
    adapters: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, _ = adapters
    path = copy_checkpoint(base, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    with LLM("model", adapter=os.path.relpath(a), **OPTIONS, **options) as llm:
        merged = results(llm)
        monkeypatch.chdir(a.parent)
        llm.unload_adapter()
        plain = results(llm)
        llm.load_adapter(a.name)
        assert results(llm) == merged != plain
        file = path / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        for error in ("is not a complete safetensors file", "has no .*safetensors"):
            with pytest.raises(ValueError, match=error):
                llm.unload_adapter()
            llm.reset_prefix_cache()
            assert results(llm) == merged and llm.metrics()["adapter"] == "a"
            file.unlink(missing_ok=True)
        file.write_bytes(whole)
        llm.unload_adapter()
        assert results(llm) == plain


def test_a_failure_half_way_leaves_no_adapter_and_unloading_repairs_it(
    base: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = adapters

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("the disk has gone")

    with LLM(base, **OPTIONS) as fresh:
        plain = results(fresh)
    with LLM(base, adapter=a, **OPTIONS) as llm:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk has gone"):
            patch.setattr(weights, "fill", fail)
            llm.load_adapter(b)
        assert llm.metrics()["adapter"] == "none" and "adapter" not in repr(llm)
        with pytest.raises(
            RuntimeError,
            match=r"from the checkpoint, if they came from one, with unload_adapter\(\)",
        ):
            llm.generate([[1, 2, 3]], use_tqdm=False)
        llm.unload_adapter()
        assert results(llm) == plain
