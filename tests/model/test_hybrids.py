"""Models whose layers keep a state for each sequence, against transformers.

Small random checkpoints in float32: Qwen3.5, dense and with experts, Qwen3-Next, LFM2. Prompts end
before, at and after the ends of the convolution (4 tokens) and of the chunks of the rule (64).
"""

import functools
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import fp8_checkpoints
import pytest
import torch
from attention_cases import HAS_CUDA
from fp8_checkpoints import quantised_copy
from int4_checkpoints import checkpoints as int4_checkpoints
from new_weights import assert_models_fit, assert_weights_change, with_other_values
from plain_modules import assert_layers_know_their_names
from ranks_in_threads import ranks_of
from safetensors.torch import load_file, save_file

from checkpoints import (
    SMALL,
    assert_greedy,
    assert_idle,
    copy_checkpoint,
    greedy,
    interrupt_after_launch,
    make_checkpoint,
    outputs_of,
    rare,
    reference_logprobs,
    run_steps,
    stack_experts,
    tokens,
    with_rare,
)
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.checkpoint.model_config import (
    DeltaNetConfig,
    ExpertConfig,
    LayerConfig,
    ModelConfig,
    ShortConvConfig,
)
from nanovllm.checkpoint.rope import RopeParameters
from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.engine import assembly
from nanovllm.engine.kv_pool import KVCachePool
from nanovllm.layers.base import Build
from nanovllm.models import model_class
from nanovllm.models.loader import load_model
from nanovllm.recurrent.gated_delta_net import GatedDeltaNet
from nanovllm.recurrent.short_conv import ShortConv
from nanovllm.recurrent.snapshots import SnapshotBlockManager
from nanovllm.sizing import memory
from nanovllm.sizing.model_size import model_size, states
from nanovllm.utils.context import Context, use_context

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,  # the last attends
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "initializer_range": 0.15,  # more, and transformers' own float32 is off by 1e-4
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
LFM2_LAYERS = ["conv", "full_attention", "conv", "conv"]
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "qwen3.5 moe": ("qwen3_5_moe_text", EXPERTS),
    "qwen3-next": ("qwen3_next", {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False}),
    # The last layer keeps a state, so it drops rows; every value head has a key head of its own.
    "qwen3.5, a state at the end": (
        "qwen3_5_text",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "num_hidden_layers": 2,
            "linear_num_key_heads": 4,
        },
    ),
}
LFM2: dict[str, Any] = {"conv_L_cache": 3, "block_multiple_of": 32, "layer_types": LFM2_LAYERS}
CHECKPOINTS |= {
    "lfm2": ("lfm2", {**LFM2, "tie_word_embeddings": True, "initializer_range": 0.3}),
    "lfm2, biases": ("lfm2", {**LFM2, "conv_L_cache": 4, "conv_bias": True}),
}
# Of eight seeds that whose tokens are farthest from ties between experts: 3e-5 of a probability. A
# tie of 4e-6 fell to the other side in a GPU's float32.
_rng = random.Random(12)
PROMPTS = [[_rng.randrange(128) for _ in range(n)] for n in (1, 2, 3, 4, 63, 64, 65, 200)]
LENGTHS = [20, 17, 18, 1, 20, 22, 20, 6]
PARAMS = [greedy(n, logprobs=0) for n in LENGTHS]
OPTIONS: dict[str, Any] = {**SMALL, "max_model_len": 256, "num_kvcache_blocks": 64}
MODES: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 512},
    "chunks of 12": {"max_num_batched_tokens": 12},
    "chunks of 12, overlap": {"max_num_batched_tokens": 12, "overlap": True},
    "preempted": {"num_kvcache_blocks": 14, "overlap": True},
    "few at once": {"max_num_seqs": 2, "max_num_batched_tokens": 33, "mixed_steps": False},
}


# What the others have of their own is tried in one mode, and without snapshots.
USUAL = {"qwen3.5 moe", "lfm2"}
WITH_SNAPSHOTS = with_rare(CHECKPOINTS, *(CHECKPOINTS.keys() - USUAL))
USUAL_MODES = {"chunks of 12, overlap"}
FAMILY_MODES = [
    (name, mode) if name in USUAL or mode in USUAL_MODES else rare(name, mode)
    for name in CHECKPOINTS
    for mode in MODES
]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds `CHECKPOINTS`, once each."""

    @functools.cache
    def build(name: str) -> Path:
        family, config = CHECKPOINTS[name]
        directory = tmp_path_factory.mktemp("checkpoint") / "model"
        return make_checkpoint(directory, family, **{**SIZES, **config})

    return build


@pytest.fixture(scope="module", params=CHECKPOINTS)
def path(request: pytest.FixtureRequest, make: Callable[[str], Path]) -> Path:
    return make(request.param)


def assert_right(path: Path, outputs: list[RequestOutput], which: slice = slice(None)) -> None:
    """Greedy tokens of `PROMPTS`, and their log-probabilities, are transformers'."""
    assert [len(found) for found in tokens(outputs)] == LENGTHS[which]
    assert_greedy(path, PROMPTS[which], outputs)
    for prompt, output in zip(PROMPTS[which], outputs, strict=True):
        found = output["token_ids"]
        wanted = reference_logprobs(path, [*prompt, *found])[len(prompt) - 1 : -1]
        logprobs = output.outputs[0].logprobs
        own = [entry[token].logprob for entry, token in zip(logprobs, found, strict=True)]
        want = wanted.gather(1, torch.tensor(found)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(own), want, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("low_guesses")
@pytest.mark.parametrize(("path", "mode"), FAMILY_MODES, indirect=["path"])
def test_tokens_and_logprobs_are_those_of_transformers(path: Path, mode: str) -> None:
    """Rows of states are used again: there are more prompts than rows, and one is aborted."""
    with LLM(path, **{**OPTIONS, **MODES[mode]}) as llm:
        aborted = llm.add_request(PROMPTS[-1][::-1], greedy(40))
        for _ in range(3):
            llm.step()
        llm.abort(aborted)
        assert_right(path, outputs_of(llm, PROMPTS, PARAMS))
        assert (llm.metrics()["num_preemptions"] > 0) == (mode == "preempted")
        assert llm.metrics()["num_cached_tokens"] == 0
        assert_idle(llm)


@pytest.mark.usefixtures("threads")
def test_ranks_divide_the_heads(path: Path) -> None:
    with LLM(path, tensor_parallel_size=2, **OPTIONS) as llm:
        assert len(ranks_of(llm).runners) == 2
        assert_right(path, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def test_new_weights_are_those_of_a_fresh_engine(path: Path, tmp_path: Path) -> None:
    other = with_other_values(path, tmp_path / "other")
    assert_weights_change(path, other, **OPTIONS)
    assert_models_fit(path, other, **OPTIONS)


@pytest.mark.parametrize("path", WITH_SNAPSHOTS, indirect=True)
def test_samples_of_a_prompt_have_states_of_their_own(path: Path) -> None:
    """Each of four is the one that its seed gives alone, wherever its row lies."""
    prompt, seed = PROMPTS[4], 7
    params = SamplingParams(n=4, seed=seed, max_tokens=12)
    with LLM(path, **OPTIONS) as llm:
        [together] = llm.generate([prompt], params, use_tqdm=False)
        [among, *_] = llm.generate([prompt, *PROMPTS], [params, *PARAMS], use_tqdm=False)
    found, again = ([each.token_ids for each in out.outputs] for out in (together, among))
    assert found == again and len(set(map(tuple, found))) == 4


def states_after(path: Path, prompt: list[int], **options: Any) -> list[torch.Tensor]:
    """The states of a prompt in all layers."""
    with LLM(path, **{**OPTIONS, **options}) as llm:
        llm.generate([PROMPTS[-1][::-1]], greedy(3), use_tqdm=False)  # rows have had others' states
        llm.add_request(prompt, greedy(1))
        while llm.scheduler.waiting or len(llm.scheduler.running) == 0:
            llm.step()
        [seq] = llm.scheduler.running
        slot = seq.slot
        while not llm.is_finished():
            llm.step()
        modules = list(llm.model_runner.model.modules())
        states = [each.state for each in modules if isinstance(each, GatedDeltaNet)]
        states += [(each.tail,) for each in modules if isinstance(each, ShortConv)]
        return [part[slot].clone() for state in states for part in state]


@pytest.mark.parametrize("path", WITH_SNAPSHOTS, indirect=True)
def test_states_after_chunks_are_those_of_the_whole(path: Path) -> None:
    """Relative to the largest number of each."""
    options = {"max_num_seqs": 1, "overlap": False}
    whole = states_after(path, PROMPTS[-1], max_num_batched_tokens=199, **options)
    chunks = states_after(path, PROMPTS[-1], max_num_batched_tokens=12, **options)
    assert len(whole) >= 2
    for one, other in zip(whole, chunks, strict=True):
        assert one.any() and (one - other).abs().max() <= 1e-5 * one.abs().max()


# What published config.json files of these models say, as far as this library reads it.
TEXT_35B: dict[str, Any] = {
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_gate_type": "swish",
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
LFM2_1_2B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}


def test_published_configurations_are_read(tmp_path: Path) -> None:
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": TEXT_35B,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27, "out_hidden_size": 2048},
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = ModelConfig.from_pretrained(str(tmp_path))
    attends = LayerConfig(RopeParameters(1e7, 64), is_sparse=True)
    assert config.layers == (*[LayerConfig(None, is_sparse=True)] * 3, attends) * 10
    assert config.delta_net == DeltaNetConfig(16, 32, 128, 128, 4, by_key_head=False)
    names = "gate_proj", "up_proj", "down_proj"
    assert config.experts == ExpertConfig(
        256, 8, 512, True, False, 0.0, False, False, True, "mlp.experts", names
    )
    assert config.attention_gate and config.norm_plus_one and config.is_part
    (tmp_path / "config.json").write_text(json.dumps(LFM2_1_2B))
    config = ModelConfig.from_pretrained(str(tmp_path))
    assert config.intermediate_size == 8192 and config.tie_word_embeddings
    assert [i for i, layer in enumerate(config.layers) if layer.rope] == [2, 5, 8, 10, 12, 14]
    assert config.short_conv == ShortConvConfig(3, False) and config.head_dim == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_expert_intermediate_size": 256}, "must be that of the other experts, 512, got 2"),
        ({"linear_num_value_heads": 24}, "`linear_num_value_heads` must be a multiple of"),
        ({"output_gate_type": "sigmoid"}, "`output_gate_type` 'sigmoid' is not supported, only"),
        ({"attn_output_gate": False}, "`attn_output_gate` false is not supported"),
        ({"layer_types": ["linear_attention"] * 40}, "`layer_types` must have a layer with att"),
        ({"linear_conv_kernel_dim": 1}, "`linear_conv_kernel_dim` must be between 2 and"),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = {"architectures": ["Qwen3_5MoeForCausalLM"], **TEXT_35B, **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(str(tmp_path))


def test_ranks_must_divide_the_heads(tmp_path: Path) -> None:
    raw = {"architectures": ["Qwen3_5MoeForCausalLM"], **TEXT_35B, "linear_num_key_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(str(tmp_path))
    config.check_tensor_parallel(2)
    with pytest.raises(ValueError, match="must divide linear_num_key_heads 2 of this model, got 4"):
        config.check_tensor_parallel(4)


# -- kernels ---------------------------------------------------------------------------------------


class Steps:
    """Steps of a model by itself, with slots and blocks of its sequences: two prompts, one of them
    in a chunk; then a decode beside a chunk that goes on; then both decode.
    """

    lengths = (24, 3), (25, 11), (26, 12)

    def __init__(self, config: ModelConfig, build: Build, device: str, path: Path) -> None:
        with torch.device(device):
            self.model = model_class(config.architecture)(config, build)
        load_model(self.model, path)
        options = Config(str(path), kvcache_block_size=16, max_num_seqs=4)
        pool = KVCachePool(self.model, options, Group(), torch.device(device))
        pool.allocate(5)
        self.device, self.before = device, (0, 0)
        for state in pool.rows.states:
            state.fill_(torch.nan)  # no sequence reads it
        self.hidden = [self.step(lengths) for lengths in self.lengths]

    def step(self, lengths: tuple[int, int]) -> torch.Tensor:
        """The hidden states of the step at whose end sequences have these lengths."""
        items = sorted(
            (end - begin, slot, begin, end)
            for slot, (begin, end) in enumerate(zip(self.before, lengths, strict=True), 1)
        )
        items.sort(key=lambda item: item[0] > 1)  # decodes first
        self.before = lengths
        num_decodes = sum(item[0] == 1 for item in items)
        positions = [p for _, _, begin, end in items for p in range(begin, end)]
        ids = [PROMPTS[-1][p] if slot == 1 else PROMPTS[-2][p] for _, slot, begin, end in items
               for p in range(begin, end)]  # fmt: skip
        slots = [slot for _, slot, _, _ in items]
        blocks = {1: [1, 2], 2: [3, 4]}
        where = [16 * blocks[slot][p // 16] + p % 16 for _, slot, begin, end in items
                 for p in range(begin, end)]  # fmt: skip
        counts = [item[0] for item in items[num_decodes:]]
        ends = [item[3] for item in items]
        tensor = partial(torch.tensor, dtype=torch.int32, device=self.device)
        bounds = [tensor([0, *accumulate(each)]) for each in (counts, ends[num_decodes:])]
        context = Context(
            num_decodes,
            tensor(where),
            tensor(ends),
            tensor([blocks[slot] for slot in slots]),
            *(bounds if counts else (None, None)),
            max(counts, default=0),
            max(ends[num_decodes:], default=0),
            sum(ends[num_decodes:]),
            slots=tensor(slots),
        )
        with use_context(context), torch.inference_mode():
            return self.model(tensor(ids), tensor(positions))


@pytest.mark.parametrize(
    "path",
    CHECKPOINTS if HAS_CUDA else with_rare(CHECKPOINTS, "qwen3.5", "qwen3-next", "lfm2"),
    indirect=True,
)
def test_fused_layers_compute_what_plain_layers_do(path: Path, kernel_device: str) -> None:
    """Prompts, a chunk beside a decode, decodes; by Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    config, found = ModelConfig.from_pretrained(str(path)), []
    for fused, backend in ((False, TorchBackend()), (True, TritonBackend())):
        build = Build(torch.float16, fused, Group(), backend, 128, 16, torch.float16)
        found.append(Steps(config, build, kernel_device, path).hidden)
    for plain, fused in zip(*found, strict=True):
        assert plain.isfinite().all()
        errors = (fused - plain).float().norm(dim=1) / plain.float().norm(dim=1)
        # Of two experts that are nearly as good, a token may get the other, and so may differ
        # those after it.
        num_others = len(errors) // 2 if config.experts else 0
        assert errors.sort().values[len(errors) - 1 - num_others] < 2e-2


ON_GPUS: dict[str, dict[str, Any]] = {
    "graphs": {"max_num_batched_tokens": 512},
    "chunks": {"max_num_batched_tokens": 50, "overlap": False},
    "eager": {"enforce_eager": True, "max_num_batched_tokens": 50},
    "plain": {"fused_kernels": False, "attention_backend": "torch"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ON_GPUS)
def test_on_a_gpu_tokens_are_those_of_transformers(path: Path, mode: str) -> None:
    """In float32: whole prompts and chunks beside decodes, rows that are used again, snapshots."""
    options = {**OPTIONS, "device": "cuda", "dtype": "float32", **ON_GPUS[mode]}
    with LLM(path, **options) as llm:
        for prompts, params in ((PROMPTS, PARAMS), (BRANCHES, [greedy(9)] * 8), (PROMPTS, PARAMS)):
            outputs = outputs_of(llm, prompts, params)
            assert_greedy(path, prompts, outputs)
        metrics = llm.metrics()
        assert metrics["num_snapshot_hits"] >= 4
        assert (metrics["num_graph_replays"] > 0) == (mode in ("graphs", "chunks"))


# -- how checkpoints are stored --------------------------------------------------------------------


FEW = slice(3, 6)  # prompts, which show a wrong weight as well as all do


def assert_loaded(path: Path, exact: Path, num_ranks: int = 1) -> None:
    """An engine of one checkpoint says what transformers says of the other."""
    with LLM(path, tensor_parallel_size=num_ranks, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS[FEW], PARAMS[FEW], use_tqdm=False)
    assert_right(exact, outputs, FEW)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["text", "whole", "text, whole names"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 moe"])
@pytest.mark.usefixtures("threads")
def test_published_files_have_other_parts(
    name: str, kind: str, num_ranks: int, make: Callable[[str], Path], tmp_path: Path
) -> None:
    """Experts in one tensor, layers that draft, and a part for images, which are left out; as
    transformers does, also where config.json is that of the text model.
    """
    is_part = kind == "whole"
    if num_ranks == 2 and not is_part:
        pytest.skip("one of them is enough")
    text = make(name)
    published = Path(shutil.copytree(text, tmp_path / "published"))
    if "moe" in name:
        stack_experts(published)
    tensors = {"mtp.fc.weight": torch.zeros(3, 3), "mtp.layers.0.norm.weight": torch.zeros(3)}
    for tensor_name, tensor in load_file(published / "model.safetensors").items():
        own = tensor_name
        if kind != "text" and own.startswith("model."):
            own = f"model.language_model.{own.removeprefix('model.')}"
        tensors[own] = tensor
    if kind != "text":
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(3)
    if is_part:
        inner = json.loads((text / "config.json").read_text())
        [architecture] = inner.pop("architectures")
        outer = {
            "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
            "tie_word_embeddings": inner["tie_word_embeddings"],
            "vision_config": {"depth": 1, "out_hidden_size": 64},
            "text_config": inner,
        }
        (published / "config.json").write_text(json.dumps(outer))
    save_file(tensors, published / "model.safetensors")
    assert_loaded(published, text, num_ranks)


# What FP8 releases leave as it was, by layer.
IN_16 = (
    *("input_layernorm", "post_attention_layernorm", "linear_attn.conv1d", "linear_attn.norm"),
    *("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba", "mlp.gate"),
    "mlp.shared_expert_gate",
)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        *(("qwen3.5", 1), ("qwen3.5", 2), ("qwen3.5 moe", 1), ("qwen3-next", 1)),
        *(("lfm2, biases", 1), ("lfm2, biases", 2)),
    ],
)
@pytest.mark.usefixtures("threads")
def test_files_in_fp8_leave_some_projections_as_they_were(
    name: str, num_ranks: int, make: Callable[[str], Path], tmp_path: Path
) -> None:
    """The last layer as a whole, and all that releases leave."""
    exact = copy_checkpoint(make(name), tmp_path / "exact")
    names = [f"model.language_model.layers.{i}.{own}" for i in range(4) for own in IN_16]
    says = {"modules_to_not_convert": ["lm_head", "model.language_model.layers.3", *names]}
    path = quantised_copy(
        exact, tmp_path / "quantised", "blocks", lambda module: "layers.3." in module, says
    )
    assert_loaded(path, exact, num_ranks)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_gates_may_be_quantised_too(
    name: str, make: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fp8_checkpoints, "PROJECTIONS",
        (*fp8_checkpoints.PROJECTIONS, "in_proj_a", "in_proj_b", "in_proj_ba"),
    )  # fmt: skip
    exact = copy_checkpoint(make(name), tmp_path / "exact")
    path = quantised_copy(exact, tmp_path / "quantised", "rows", lambda module: False)
    assert any(
        "in_proj_b" in key and "scale" in key for key in load_file(path / "model.safetensors")
    )
    assert_loaded(path, exact)


def test_experts_in_one_tensor_are_in_16_bits_whatever_the_rest_is_in(
    make: Callable[[str], Path], tmp_path: Path
) -> None:
    exact = copy_checkpoint(make("qwen3.5 moe"), tmp_path / "exact")
    path = quantised_copy(exact, tmp_path / "quantised", "rows", lambda module: ".mlp." in module)
    stack_experts(path)
    assert_loaded(path, exact)


def test_layers_with_a_state_stay_as_they_were_in_a_file_in_4_bits(tmp_path: Path) -> None:
    says = {"modules_to_not_convert": ["linear_attn"]}
    path, exact = int4_checkpoints(
        tmp_path, "awq", "qwen3_5_text", lambda module: "linear_attn" in module, says, **SIZES
    )
    assert_loaded(path, exact)


@pytest.mark.parametrize(
    ("name", "way", "num_ranks"),
    [
        *(("qwen3.5", "awq", 1), ("qwen3.5", "gptq", 2), ("lfm2, biases", "compressed, zeros", 2)),
        *(rare("lfm2", "awq", 1), rare("qwen3.5", "compressed", 1)),
    ],
)
@pytest.mark.usefixtures("threads")
def test_layers_with_a_state_in_4_bits(name: str, way: str, num_ranks: int, tmp_path: Path) -> None:
    family, config = CHECKPOINTS[name]
    path, exact = int4_checkpoints(tmp_path, way, family, **{**SIZES, **config})
    assert any("in_proj" in key and "scale" in key for key in load_file(path / "model.safetensors"))
    assert_loaded(path, exact, num_ranks)


# -- memory ----------------------------------------------------------------------------------------


def test_memory_limits_the_sequences_at_once(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of what is left is for states: here of four sequences, beside the row of padding and one
    for a snapshot.
    """
    path = make("qwen3.5")
    channels, heads = 2 * 2 * 16 + 4 * 32, 4 * 16 * 32  # of a layer; float32
    size = 3 * 4 * (3 * channels + heads)
    monkeypatch.setattr(memory, "CPU_LIMIT", 2 * 6 * size + size)
    with caplog.at_level("INFO", "nanovllm"), LLM(path, **OPTIONS) as llm:
        assert llm.scheduler.max_num_seqs == 4
        assert_right(path, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        states = [line for line in caplog.messages if line.startswith("states: 4 sequences")]
        assert len(states) == 1 and " of the 8 of max_num_seqs" in states[0]
    monkeypatch.setattr(memory, "CPU_LIMIT", 2 * size)
    with pytest.raises(ValueError, match=r"^no memory for states of sequences: each takes"):
        LLM(path, **OPTIONS)


def test_sizes_are_those_of_the_checkpoint(path: Path) -> None:
    """Parameters of matrices and bytes of states, of which the roofline is made."""
    config = ModelConfig.from_pretrained(str(path))
    matrices = {
        name: tensor.numel()
        for name, tensor in load_file(path / "model.safetensors").items()
        if tensor.squeeze().dim() == 2 and "conv1d" not in name and "conv.conv" not in name
    }
    own_head = config.tie_word_embeddings or matrices.pop("model.embed_tokens.weight")
    assert own_head
    routed = sum(size for name, size in matrices.items() if ".experts." in name)
    found = model_size(config)
    gates = sum(layer.is_sparse for layer in config.layers) * config.hidden_size
    is_shared = config.experts is not None  # a row, so no matrix to `squeeze`
    counted = sum(part.dense + part.sparse for part in (found.linear, found.plain))
    assert counted + found.head == sum(matrices.values()) + is_shared * gates
    assert found.linear.sparse == routed and found.plain.sparse == 0
    assert_layers_know_their_names(path)
    with LLM(path, **OPTIONS) as llm:
        assert states(config, 4).num_bytes == llm.model_runner.built.pool.sequence_bytes > 0


# -- snapshots -------------------------------------------------------------------------------------

SHARED = [_rng.randrange(128) for _ in range(200)]
# They leave each other at 64, 100, 128 and 192 tokens, and one ends with a block.
BRANCHES = [
    [*SHARED[:n], *(_rng.randrange(128) for _ in range(more))]
    for n, more in ((200, 3), (64, 9), (100, 30), (128, 1), (192, 0), (200, 3), (130, 70), (64, 1))
]


@pytest.fixture
def close_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of a prompt may be next to each other."""
    manager = partial(SnapshotBlockManager, distance=1)
    monkeypatch.setattr(assembly, "SnapshotBlockManager", manager)


@pytest.mark.usefixtures("close_by")
@pytest.mark.parametrize("path", WITH_SNAPSHOTS, indirect=True)
@pytest.mark.parametrize(
    ("chunk", "overlap", "num_rows"),
    [
        *((512, True, None), (512, False, 1), (50, False, None), (50, True, 1)),
        *(rare(512, False, None), rare(512, True, 1), rare(50, True, None), rare(50, False, 1)),
    ],
)
def test_what_comes_from_snapshots_is_what_was_computed(
    path: Path, chunk: int, overlap: bool, num_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that branch off each other, together and again, in both orders; with one row most
    snapshots are given up.
    """
    if num_rows is not None:
        monkeypatch.setattr(KVCachePool, "snapshot_rows", range(9, 9 + num_rows))
    with LLM(path, **{**OPTIONS, "max_num_batched_tokens": chunk, "overlap": overlap}) as llm:
        for prompts in (BRANCHES, BRANCHES[::-1]):
            outputs = outputs_of(llm, prompts, [greedy(6)] * len(prompts))
            assert_greedy(path, prompts, outputs)
        metrics = llm.metrics()
        assert metrics["num_snapshots"] >= 2 and metrics["num_snapshot_tokens"] >= 64 * 8
        assert metrics["num_snapshot_hits"] >= 7
        if num_rows == 1:
            assert len(llm.scheduler.block_manager.snapshots) == 1 < metrics["num_snapshots"]


@pytest.mark.parametrize("path", WITH_SNAPSHOTS, indirect=True)
@pytest.mark.usefixtures("threads")
def test_ranks_take_snapshots_alike(path: Path) -> None:
    with LLM(path, tensor_parallel_size=2, **OPTIONS) as llm:
        outputs = llm.generate(BRANCHES, greedy(6), use_tqdm=False)
        assert llm.metrics()["num_snapshot_hits"] >= 4
    assert_greedy(path, BRANCHES, outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["lfm2"], indirect=True)
def test_replicas_count_snapshots_together(path: Path) -> None:
    with LLM(path, data_parallel_size=2, **OPTIONS) as llm:
        prompts = [*BRANCHES, *[[*prompt[::-1], 5] for prompt in BRANCHES]]
        outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
        metrics = llm.metrics()
    assert_greedy(path, prompts, outputs)
    each = [metrics["replicas"][number]["num_snapshot_tokens"] for number in "01"]
    assert metrics["num_snapshot_tokens"] == sum(each) > 0


@pytest.mark.parametrize("path", WITH_SNAPSHOTS, indirect=True)
def test_samples_of_a_long_prompt_are_computed_from_a_snapshot(path: Path) -> None:
    """Of 200 tokens all but the first sample compute the last eight, and give the same text."""
    params = SamplingParams(n=4, seed=3, max_tokens=5)
    found = []
    for caching in (False, True):
        with LLM(path, **{**OPTIONS, "enable_prefix_caching": caching}) as llm:
            [output] = llm.generate([PROMPTS[-1]], params, use_tqdm=False)
            found.append([each.token_ids for each in output.outputs])
            metrics = llm.metrics()
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) == 4
    assert metrics["num_snapshots"] == 1 and metrics["num_snapshot_tokens"] == 3 * 192


@pytest.mark.parametrize("path", WITH_SNAPSHOTS, indirect=True)
def test_rows_of_steps_that_are_dropped_come_back(path: Path) -> None:
    """All requests are aborted while a step takes a snapshot; two samples share one after that."""
    params = SamplingParams(n=2, seed=1, max_tokens=2)
    with LLM(path, **{**OPTIONS, "overlap": True, "max_num_seqs": 4}) as llm:
        num_rows = len(llm.scheduler.block_manager.rows)
        for i in range(num_rows + 1):
            request = llm.add_request([(i + t) % 128 for t in range(70)], params)
            llm.step()
            assert llm.scheduler.block_manager._saving or i == num_rows
            llm.abort(request)
        llm.generate([PROMPTS[-1]], params, use_tqdm=False)
        assert llm.metrics()["num_snapshot_hits"] == 1
        assert not llm.scheduler.block_manager._saving


@pytest.mark.parametrize("path", WITH_SNAPSHOTS, indirect=True)
@pytest.mark.parametrize("k", [1, 2, rare(3), 4, rare(5), rare(6), 7])
def test_a_step_that_is_repeated_moves_no_state_twice(
    path: Path, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the k-th step was launched, whose states have moved on, and before its books."""
    with LLM(path, **{**OPTIONS, "max_num_batched_tokens": 50}) as llm:
        ids = [llm.add_request(*item) for item in zip(BRANCHES, [greedy(6)] * 8, strict=True)]
        done = interrupt_after_launch(monkeypatch, llm, k)
        done |= run_steps(llm)
        assert_greedy(path, BRANCHES, [{"token_ids": done[i]} for i in ids])
        assert llm.metrics()["num_preemptions"] == 0
