"""Checkpoint weights: every parameter filled, every tensor used, or an error that names them."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import (
    PROMPT,
    SMALL,
    assert_usable,
    copy_checkpoint,
    edit_json,
    edit_tensors,
    greedy,
    make_checkpoint,
    reference_logprobs,
)
from nanovllm import LLM
from nanovllm.checkpoint.files import INDEX
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.names import EMBEDDING, HEAD
from nanovllm.layers.weights.shard import Shard, UnheldShard
from nanovllm.models.loader import as_stored, checkpoint_shards, match

READABLE = {**SMALL, "fused_kernels": False}  # oneDNN keeps weights to itself
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
Q_KEY = Q_PROJ.replace(".", "__")


@pytest.fixture
def model_dir(checkpoint, tmp_path):
    """A checkpoint of the test's own, in one file."""
    return copy_checkpoint(checkpoint, tmp_path / "model")


@pytest.fixture(scope="module")
def sharded_source(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded") / "qwen3"
    return make_checkpoint(path, shard="100KB")


@pytest.fixture
def sharded_dir(sharded_source, tmp_path):
    """A checkpoint of the test's own, in several files and an index."""
    path = copy_checkpoint(sharded_source, tmp_path / "model")
    assert len(list(path.glob("*.safetensors"))) > 2
    assert not (path / "model.safetensors").exists()
    return path


def weight_map(path: Path) -> dict[str, str]:
    return json.loads((path / INDEX).read_text())["weight_map"]


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "saved", "is_part", "found", "missing", "unused"),
    [
        ([Q_PROJ], [Q_PROJ], False, {Q_PROJ: Q_PROJ}, [], []),
        ([Q_PROJ, HEAD], ["x", "b"], False, None, [HEAD, Q_PROJ], ["b", "x"]),
        ([Q_PROJ, HEAD], [Q_PROJ, HEAD, "a.rotary_emb.inv_freq"], False, None, [], []),
        # A tied model: a head beside the embedding is a copy, a head alone takes its place.
        ([EMBEDDING], [EMBEDDING, HEAD], False, {EMBEDDING: EMBEDDING}, [], []),
        ([EMBEDDING], [HEAD], False, {EMBEDDING: HEAD}, [], []),
        ([EMBEDDING, HEAD], [HEAD], False, None, [EMBEDDING], []),
        # Other spellings.
        ([EMBEDDING], ["embed_tokens.weight"], False, {EMBEDDING: "embed_tokens.weight"}, [], []),
        (
            [EMBEDDING, HEAD],
            ["model.language_model.embed_tokens.weight", "language_model.lm_head.weight"],
            True,
            {
                EMBEDDING: "model.language_model.embed_tokens.weight",
                HEAD: "language_model.lm_head.weight",
            },
            [],
            [],
        ),
        (
            ["model.a.weight_scale"],
            ["model.a.weight_scale_inv"],
            False,
            {"model.a.weight_scale": "model.a.weight_scale_inv"},
            [],
            [],
        ),
    ],
)
def test_a_models_tensors_are_found_by_their_names(
    needs, saved, is_part, found, missing, unused
) -> None:
    """No file is read, and no model is built."""
    shards = {name: Shard.whole(torch.empty(0)) for name in needs}
    matching = match(shards, saved, is_part)
    assert (matching.missing, matching.unused) == (missing, unused)
    assert bool(matching.problems()) == bool(missing or unused)
    if found is not None:
        assert {name: matching.shards[found[name]] for name in needs} == shards


def test_an_optional_tensor_may_be_missing() -> None:
    shards = {"model.a.g_idx": UnheldShard.whole(torch.empty(0))}
    assert match(shards, []).missing == []
    assert match(shards, ["model.a.g_idx"]).unused == []


@pytest.mark.parametrize("own", ["model.a.weight", "model.a.qweight"])
def test_problems_say_when_codes_are_the_reason(own) -> None:
    shards = {own: Shard.whole(torch.empty(0))}
    *_, reason = match(shards, ["model.a.scales"]).problems()
    assert ("without a `quantization_config`" in reason) == (own == "model.a.weight")
    assert ("contradicts `quantization_config`" in reason) == (own == "model.a.qweight")


# -- what loads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"num_key_value_heads": 4}],
    ids=["untied", "tied", "bias", "mha"],
)
@pytest.mark.parametrize("shard", ["1GB", "100KB"], ids=["whole", "sharded"])
def test_every_tensor_fills_its_rows(overrides, shard, tmp_path):
    path = make_checkpoint(tmp_path / "model", seed=3, shard=shard, **overrides)
    saved = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    with LLM(path, **READABLE) as llm:
        targets = checkpoint_shards(llm.model_runner.model)
        assert set(targets) == set(saved)
        for name, tensor in saved.items():
            assert torch.equal(targets[name].target, tensor), name
        assert_usable(llm, path)


def test_stray_file_beside_an_index_is_ignored(sharded_dir):
    noise = {name: torch.zeros(3) for name in weight_map(sharded_dir)}
    save_file({**noise, "left.over": torch.zeros(3)}, sharded_dir / "aaa.safetensors")
    save_file(noise, sharded_dir / "zzz.safetensors")
    with LLM(sharded_dir, **SMALL) as llm:
        assert_usable(llm, sharded_dir)


def test_saved_copies_of_tied_and_rotary_tensors_are_ignored(tmp_path):
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    inv_freq = "model__layers__0__self_attn__rotary_emb__inv_freq"
    edit_tensors(path, lm_head__weight=embedding.clone(), **{inv_freq: torch.ones(16)})
    with LLM(path, **SMALL) as llm:
        assert_usable(llm, path)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_own_head_of_a_model_that_should_be_tied_is_kept(family, tmp_path, caplog):
    """It was dropped without a word. Transformers keeps it, and warns."""
    path = make_checkpoint(tmp_path / "model", family, tie_word_embeddings=False)
    edit_json(path / "config.json", tie_word_embeddings=True)
    with LLM(path, **SMALL) as llm:
        assert_usable(llm, path)
        [score] = llm.score([PROMPT], use_tqdm=False)
    wanted = reference_logprobs(path, PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])
    torch.testing.assert_close(torch.tensor(score.logprobs), wanted[:, 0], atol=1e-4, rtol=0)
    ours = [record.message for record in caplog.records if record.name.startswith("nanovllm")]
    [said] = [message for message in ours if "tie_word_embeddings" in message]
    assert "lm_head.weight differs from model.embed_tokens.weight" in said


def test_heads_that_differ_in_one_number_differ(tmp_path):
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True, vocab_size=5000)
    config = ModelConfig.from_pretrained(str(path))
    head = load_file(path / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_tensors(path, lm_head__weight=head)
    assert as_stored(config, path) == config
    head[-1, -1] += 1e-3
    edit_tensors(path, lm_head__weight=head)
    assert as_stored(config, path) == dataclasses.replace(config, tie_word_embeddings=False)


def test_tied_model_may_have_its_matrix_as_the_head(tmp_path):
    """Transformers ties to whichever of the two is there."""
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    matrix = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(path, model__embed_tokens__weight=None, lm_head__weight=matrix)
    with LLM(path, **SMALL) as llm:
        assert_usable(llm, path)


def test_files_with_weights_that_are_not_read_are_named(sharded_dir, caplog):
    save_file({Q_PROJ: torch.zeros(128, 64)}, sharded_dir / "model.safetensors")
    (sharded_dir / "adapter_config.json").write_text("{}")
    with LLM(sharded_dir, **SMALL):
        pass
    said = [record.message for record in caplog.records if "is ignored" in record.message]
    assert ["model.safetensors" in said[0], "adapter_config.json" in said[1]] == [True, True]


def test_weights_are_converted_to_the_chosen_dtype(model_dir):
    tensors = load_file(model_dir / "model.safetensors")
    half = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    edit_tensors(model_dir, **{name.replace(".", "__"): t for name, t in half.items()})
    with LLM(model_dir, **READABLE) as llm:  # "auto" is float32 on a CPU
        loaded = checkpoint_shards(llm.model_runner.model)[Q_PROJ].target
        assert loaded.dtype is torch.float32
        assert torch.equal(loaded, half[Q_PROJ].float())
        assert llm.metrics()["dtype"] == "float32"
        assert_usable(llm, model_dir)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({Q_KEY: None}, f"missing from the checkpoint: {Q_PROJ}$"),
        ({"model__norm__weight": None, "lm_head__weight": None}, "lm_head.weight, model.norm.wei"),
        ({"extra__weight": torch.ones(2)}, "not used by this model: extra.weight$"),
        (
            {Q_KEY: None, "q__weight": torch.ones(2)},
            f"missing from the checkpoint: {Q_PROJ}; not used by this model: q.weight$",
        ),
        ({f"x{i:02}": torch.ones(2) for i in range(11)}, "x00, x01, .*, x07 and 3 more$"),
        (
            {Q_KEY: torch.ones(64, 64)},
            rf"tensor {Q_PROJ} has shape \[64, 64\], but config.json implies \[128, 64\]",
        ),
        (
            {Q_KEY: torch.ones(128, 64, dtype=torch.int8)},
            f"tensor {Q_PROJ} is I8, but config.json implies F64 or F32",
        ),
        (
            {Q_KEY: torch.ones(128, 64).to(torch.float8_e4m3fn)},
            f"tensor {Q_PROJ} is F8_E4M3, but config.json implies F64",
        ),
    ],
    ids=["missing", "two-missing", "unused", "renamed", "many", "shape", "int8", "float8"],
)
def test_tensors_that_do_not_fit_are_named(changes, match, model_dir):
    """Defect 5: no parameter may stay uninitialised, no tensor be dropped in silence."""
    edit_tensors(model_dir, **changes)
    with pytest.raises(ValueError, match=match):
        LLM(model_dir, **SMALL)


def test_untied_model_without_head_is_refused(tmp_path):
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    edit_json(path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing from the checkpoint: lm_head\.weight$"):
        LLM(path, **SMALL)


def test_index_naming_a_missing_file(sharded_dir):
    file = weight_map(sharded_dir)[Q_PROJ]
    (sharded_dir / file).unlink()
    with pytest.raises(ValueError, match=rf"files named in {INDEX} are missing: {file}"):
        LLM(sharded_dir, **SMALL)


def test_index_naming_a_tensor_that_its_file_lacks(sharded_dir):
    names = weight_map(sharded_dir)
    file = names[Q_PROJ]
    tensors = load_file(sharded_dir / file)
    del tensors[Q_PROJ]
    save_file(tensors, sharded_dir / file)
    with pytest.raises(ValueError, match=rf"{file} lacks the tensor {Q_PROJ} that {INDEX} assigns"):
        LLM(sharded_dir, **SMALL)


def test_tensor_left_out_of_the_index_is_missing(sharded_dir):
    names = weight_map(sharded_dir)
    del names[Q_PROJ]
    edit_json(sharded_dir / INDEX, weight_map=names)
    with pytest.raises(ValueError, match=f"missing from the checkpoint: {Q_PROJ}$"):
        LLM(sharded_dir, **SMALL)


@pytest.mark.parametrize(
    "name",
    ["{}/x", "../elsewhere/x", "below/x", "./x", "..", "", "x\0", "x" * 300],
    ids=["absolute", "above", "below", "dot", "parent", "empty", "null", "long"],
)
def test_index_naming_what_is_no_file_of_the_directory(name, sharded_dir):
    """Files anywhere on the machine were read."""
    names, elsewhere = weight_map(sharded_dir), sharded_dir.parent / "elsewhere"
    name = name.format(elsewhere)
    for folder in (sharded_dir, sharded_dir / "below", elsewhere):
        folder.mkdir(exist_ok=True)
        (folder / "x").write_bytes((sharded_dir / names[Q_PROJ]).read_bytes())
    moved = {t: name if file == names[Q_PROJ] else file for t, file in names.items()}
    edit_json(sharded_dir / INDEX, weight_map=moved)
    with pytest.raises(ValueError, match=f"(?s){sharded_dir}.*{re.escape(name)}"):
        LLM(sharded_dir, **SMALL)


def test_links_of_the_hubs_cache_are_followed(sharded_dir, tmp_path):
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    sharded_dir.rename(tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    with LLM(snapshot, **SMALL) as llm:
        assert_usable(llm, snapshot)


NO_FILES = {
    "a link to nothing": lambda path: path.symlink_to("../nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", INDEX, "model.safetensors", "tokenizer.json"],
)
def test_what_is_no_file_is_named(name, what, model_dir):
    """It was an OSError from somewhere, or passed over in silence."""
    (model_dir / name).unlink(missing_ok=True)
    NO_FILES[what](model_dir / name)
    with pytest.raises(ValueError, match=f"{model_dir / name} must be a file.*download"):
        LLM(model_dir, **SMALL)


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("has_index", [True, False])
def test_what_is_no_file_is_named_among_others(has_index, what, sharded_dir):
    file = sharded_dir / weight_map(sharded_dir)[Q_PROJ]
    file.unlink()
    NO_FILES[what](file)
    if not has_index:
        (sharded_dir / INDEX).unlink()
    with pytest.raises(ValueError, match=f"{file} must be a file"):
        LLM(sharded_dir, **SMALL)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not valid JSON: .*line 1"),
        ("[1]", "must hold a JSON object, got list"),
        *(('{"x":' + "[" * n + "]" * n + "}", "is not valid JSON") for n in (60, 700, 100_000)),
        ('{"x": ' + "1" * 5000 + "}", "is not valid JSON: .*digits"),
        ('{"x": "\xff"}', "is not valid JSON: .*utf-8"),
    ],
    ids=["open", "list", "deep", "deeper", "deepest", "digits", "latin-1"],
)
def test_invalid_json_names_the_file(name, text, match, model_dir):
    (model_dir / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"{name} {match}"):
        LLM(model_dir, **SMALL)


def test_missing_directory_or_files_are_named(model_dir, tmp_path):
    with pytest.raises(ValueError, match=r"`model` must be the directory.*nowhere.* is neither"):
        LLM(tmp_path / "nowhere", **SMALL)
    with pytest.raises(ValueError, match="`model` must be the directory"):
        LLM("x" * 5000, **SMALL)
    with pytest.raises(ValueError, match="`model` must be the directory of a checkpoint"):
        LLM(model_dir / "config.json", **SMALL)
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors.*save_pretrained"):
        LLM(model_dir, **SMALL)
    (model_dir / "config.json").unlink()
    with pytest.raises(ValueError, match=r"model has no config\.json: is it the directory of"):
        LLM(model_dir, **SMALL)


def test_broken_file_is_named(model_dir):
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        LLM(model_dir, **SMALL)


def test_two_files_with_one_tensor_are_not_mixed(model_dir):
    """A backup left beside model.safetensors must not replace weights in silence."""
    save_file({Q_PROJ: torch.zeros(128, 64)}, model_dir / "model_backup.safetensors")
    try:
        llm = LLM(model_dir, **SMALL)
    except ValueError as error:
        assert Q_PROJ in str(error)  # noqa: PT017
    else:
        assert_usable(llm, model_dir)


# -- dummy weights --------------------------------------------------------------------------------


def test_dummy_weights_need_only_config_json(checkpoint, tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    outputs, weights = [], []
    for seed in (1, 1, 2):
        with LLM(path, load_format="dummy", seed=seed, **READABLE) as llm:
            prompts = [[1, 2, 3], [100]]
            outputs.append([o["token_ids"] for o in llm.generate(prompts, greedy(8), False)])
            sampled = llm.generate(prompts, use_tqdm=False)
            outputs[-1] += [o["token_ids"] for o in sampled]
            targets = checkpoint_shards(llm.model_runner.model)
            weights.append({name: shard.target.clone() for name, shard in targets.items()})
    assert outputs[0] == outputs[1] != outputs[2]
    assert not torch.equal(weights[0][Q_PROJ], weights[2][Q_PROJ])
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert 0.018 < tensor.std() < 0.022, name
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        LLM(path, **SMALL)
