"""Kernels compiled for GPUs that are not here: shared memory, spilled registers, what each may use.

An engine runs in a process of its own on a stand-in for the GPU (`stand_in.py`), so its own code
chooses the kernels and their variants; this looks at what Triton has compiled. Nothing is executed:
whether a kernel computes what it should is for the other tests.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import triton
from early_reads import before_wait
from fp8_checkpoints import in_int8
from stand_in import CARDS, CONTROLS
from triton import knobs

from nanovllm import LLM, TINY, SamplingParams
from nanovllm.kernels.device_features import TRITONS, VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROOMY = ("9.0", "10.0")
CONVERT_FP8 = ("8.9", *ROOMY, "12.0")
# Bytes of a thread's registers that may lie in memory: of 16 bits, a quarter of its 255 registers.
# Products of float32 have no tensor cores, and a thread takes rows of both operands at once; tiles
# that spill less take longer (docs/experiments.md), but for those that do not run on the others.
MAX_SPILLED = {"bfloat16": 256, "float16": 256, "float32": 3 * 1024}
MAX_SPILLED_ROOMY = MAX_SPILLED | {"float32": 12 * 1024}
KNOWS_GLUON = TRITONS[0] <= VERSION <= TRITONS[1]
OF_PACKED = {"_hopper_int4_kernel", "_hopper_experts_kernel"}
OF_GLUON = {"_hopper_prefill_kernel", "_hopper_gated_kernel"} | OF_PACKED
WITH_DEPENDENT_LAUNCH = (*ROOMY, "12.0")
DEPENDENT_LAUNCH, TILE_COPY = "griddepcontrol", "cp.async.bulk.tensor"  # in PTX
# What kernels may read while those before them run: weights, what a step is told by the host; and
# some, whose parameters have names that mean another thing elsewhere, keys and values of earlier
# steps, states that no other kernel of the layer writes in this step, or scales of weights.
WEIGHTS = {
    *("weight_ptr", "words_ptr", "bias_ptr", "q_weight_ptr", "k_weight_ptr", "cos_sin_ptr"),
    *("conv_ptr", "norm_ptr", "A_log_ptr", "dt_bias_ptr"),
}
METADATA = {
    *("tables_ptr", "lens_ptr", "positions_ptr", "slots_ptr", "ids_ptr", "cu_q_ptr", "cu_k_ptr"),
    *("prefix_lens_ptr", "begins_ptr", "ends_ptr", "keys_ptr", "temperatures_ptr", "rows_ptr"),
}
OF_SOME = {
    "_own_decode_kernel": {"k_cache_ptr", "v_cache_ptr", "k_exponents_ptr", "v_exponents_ptr"},
    "_delta_decode_kernel": {"memory_ptr", "tail_ptr"},
    "_delta_scan_kernel": {"memory_ptr"},
    "_fp8_tiles_kernel": {"scales_ptr"},
    "_int8_tiles_kernel": {"scales_ptr"},
}


class Compiled(NamedTuple):
    """A kernel, as Triton has compiled it.

    Attributes:
        name: name of the function.
        shared: bytes of shared memory for each block of threads.
        spilled: bytes of each thread's registers that lie in memory.
        text: the assembly.
        binary: file of the machine code, on NVIDIA GPUs.
    """

    name: str
    shared: int
    spilled: int
    text: str
    binary: Path


def run(card: str, jobs: Iterable[dict[str, Any]], cache: Path, first: str = "") -> Any:
    """Output of `stand_in.py`; the compiled kernels are in `cache`. Packages in the directory
    `first` come before those of the environment.
    """
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{first}:{ROOT}"}
    command = [sys.executable, ROOT / "tests" / "stand_in.py", card, json.dumps([*jobs])]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


def compiled(cache: Path) -> list[Compiled]:
    """All kernels in Triton's cache."""
    kernels = []
    for path in cache.glob("*/_[!_]*.json"):
        facts = json.loads(path.read_text())
        if path.with_suffix(".cubin").exists():
            text = path.with_suffix(".ptx").read_text()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", path.with_suffix(".cubin")]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            spilled = sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
        else:
            text = path.with_suffix(".amdgcn").read_text()
            spilled = sum(int(size) for size in re.findall(r"\.private_segment\w+: +(\d+)", text))
        binary = path.with_suffix(".cubin")
        kernels.append(Compiled(facts["name"], facts["shared"], spilled, text, binary))
    return kernels


def check_unpacking(kernel: Compiled) -> set[str]:
    """Tensor cores take the weights from registers, and run while the next are unpacked: warps do
    not wait after each product. Returns the rows of the products.
    """
    products = re.findall(r"wgmma.mma_async.*?m64n(\d+)k16\S* {[^}]*}, {", kernel.text)
    command = [knobs.nvidia.nvdisasm.path, "-c", kernel.binary]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert code.count("HGMMA.64x") == len(products) >= 32
    assert code.count("WARPGROUP.DEPBAR") <= len(products) // 4
    return set(products)


def check(card: str, dtype: str, kernels: list[Compiled]) -> None:
    """Everything fits."""
    print(
        f"{card}, {dtype}: {len(kernels)} kernels, at most "
        f"{max(kernel.shared for kernel in kernels)} bytes of shared memory, "
        f"{max(kernel.spilled for kernel in kernels)} spilled"
    )
    max_spilled = (MAX_SPILLED_ROOMY if card in ROOMY else MAX_SPILLED)[dtype]
    assert [
        f"{kernel.name}: {kernel.shared} bytes of shared memory, {kernel.spilled} spilled"
        for kernel in kernels
        if kernel.shared > CARDS[card].target.shared_memory or kernel.spilled > max_spilled
    ] == []


def check_waits(cache: Path, wanted: Iterable[str]) -> None:
    """Kernels that may begin before others have ended (`hopper.py`) wait in every program, and
    until then read nothing that one of the step writes. All those `wanted` may.
    """
    names, wrong = set(), []
    for path in cache.glob("*/_[!_]*.json"):
        if json.loads(path.read_text()).get("launch_pdl") and path.stem not in OF_GLUON:
            names.add(path.stem)
            early = before_wait(path.with_suffix(".ttir").read_text())
            allowed = WEIGHTS | METADATA | OF_SOME.get(path.stem, set())
            if early is None or early.writes or early.may_end or early.reads - allowed:
                wrong.append((path.stem, early))
    print(f"{len(names)} kernels may begin early")
    assert set(wanted) <= names
    assert wrong == []


@pytest.mark.skipif(not KNOWS_GLUON, reason="this Triton has another Gluon")
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "bfloat16"), (64, "float16")])
def test_long_prompts_on_hopper(head_dim: int, dtype: str, tmp_path: Path) -> None:
    """All registers that there are, and none in memory but what is written once; one variant for
    all numbers of decodes before the prompts: another would be compiled in the middle of a run.
    """
    job = {"kind": "long prompts", "head_dim": head_dim, "dtype": dtype}
    assert run("9.0", [job], tmp_path) == [["tiles"]]
    (kernel,) = compiled(tmp_path)
    check("9.0", dtype, [kernel])
    assert kernel.name == "_hopper_prefill_kernel" and kernel.spilled <= 8
    assert re.search(r"setmaxnreg.dec[^;]*\b240;", kernel.text), "of the 256 while others wait"
    assert re.search(r"setmaxnreg.inc[^;]*\b240;", kernel.text) and "wgmma" in kernel.text


@pytest.mark.skipif(not KNOWS_GLUON, reason="this Triton has another Gluon")
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16"])
def test_gated_products_on_hopper(dtype: str, tmp_path: Path) -> None:
    """One variant for all numbers of rows; a group's 64 x 256 sums are registers, to which tensor
    cores add without a pause, and none lies in memory.
    """
    run("9.0", [{"kind": "gated products", "dtype": dtype}], tmp_path)
    kernels = [each for each in compiled(tmp_path) if each.name == "_hopper_gated_kernel"]
    [kernel] = kernels
    check("9.0", "bfloat16", kernels)
    width = 32 if dtype.startswith("float8") else 16
    products = re.findall(r"wgmma.mma_async.*?(m\d+n\d+k\d+)", kernel.text)
    assert products == [f"m64n256k{width}"] * 8 and kernel.spilled == 0


@pytest.mark.skipif(not KNOWS_GLUON, reason="this Triton has another Gluon")
@pytest.mark.parametrize(("dtype", "count"), [("bfloat16", 1), ("bfloat16", 5), ("float16", 5)])
def test_int4_products_on_hopper(dtype: str, count: int, tmp_path: Path) -> None:
    """One variant of each size for all numbers of rows, whose weights tensor cores take from
    registers; activations are read after the wait.
    """
    run("9.0", [{"kind": "INT4 products", "dtype": dtype, "count": count}], tmp_path)
    kernels = compiled(tmp_path)
    check("9.0", dtype, kernels)
    assert [kernel.name for kernel in kernels] == ["_hopper_int4_kernel"] * count
    widths = set()
    for kernel in kernels:
        widths |= check_unpacking(kernel)
        copies = re.split(r"griddepcontrol.wait", kernel.text)
        assert len(copies) == 2 and kernel.spilled <= 96
        before, after = (part.count("cp.async.bulk.tensor") for part in copies)
        assert before == kernel.text.count("wgmma.mma_async") // 32 and after == 4
    assert widths == ({"16", "64", "128"} if count > 1 else {"128"})


@pytest.mark.skipif(not KNOWS_GLUON, reason="this Triton has another Gluon")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_packed_experts_on_hopper(dtype: str, tmp_path: Path) -> None:
    """One token, and several numbers of rows, of two products in each format; all warps begin
    after the wait.
    """
    run("9.0", [{"kind": "packed experts", "dtype": dtype}], tmp_path)
    kernels = [each for each in compiled(tmp_path) if each.name == "_hopper_experts_kernel"]
    check("9.0", dtype, kernels)
    assert len(kernels) == (14 if dtype == "bfloat16" else 8)
    widths = set()
    for kernel in kernels:
        of_kernel = check_unpacking(kernel)
        widths |= of_kernel
        before, _ = re.split(r"griddepcontrol.wait", kernel.text)
        assert kernel.spilled == 0 or "128" in of_kernel
        assert "ld.global" not in before and "cp.async" not in before
    assert widths == {"16", "32", "64", "128"}


@pytest.mark.parametrize("card", ["8.9", "9.0", "12.0"])
def test_attention_to_fp8(card: str, tmp_path: Path) -> None:
    """Two bytes of a thread's register become two numbers by one instruction, and nothing spills in
    decode, which waits for it."""
    sizes = {"shape": "8B", "head_dim": 128, "dtype": "bfloat16", "block_size": 256, "fp8": True}
    assert run(card, [{"kind": "attention"} | sizes], tmp_path) == ["triton"]
    kernels = compiled(tmp_path)
    check(card, "bfloat16", kernels)
    for kernel in kernels:
        if kernel.name == "_decode_kernel":
            assert "cvt.rn.f16x2.e4m3x2" in kernel.text and kernel.spilled == 0


@pytest.mark.parametrize(
    ("card", "dtype"), [("8.6", "bfloat16"), ("8.6", "float32"), ("gfx942", "float32")]
)
def test_largest_attention_fits_the_least_memory(card: str, dtype: str, tmp_path: Path) -> None:
    """Heads of 256: float32 wanted 139,520 bytes (73,728 on gfx942); 16 bits spilled 784."""
    sizes = {"shape": "8B", "head_dim": 256, "dtype": dtype, "block_size": 16}
    assert run(card, [{"kind": "attention"} | sizes], tmp_path) == ["triton"]
    kernels = compiled(tmp_path)
    names = Counter(kernel.name for kernel in kernels)
    wanted = {"_decode_kernel": 3, "_prefill_kernel": 2, "_prefix_kernel": 1}
    assert names == wanted, "with windows, soft-caps and sinks, or a shared prefix"
    check(card, dtype, kernels)


@pytest.mark.parametrize(("card", "dtype"), [("9.0", "bfloat16"), ("8.0", "float16")])
def test_images(card: str, dtype: str, tmp_path: Path) -> None:
    """Towers' heads of 64 spill nothing."""
    run(card, [{"kind": "images", "dtype": dtype}], tmp_path)
    kernels = compiled(tmp_path)
    check(card, dtype, kernels)
    names = Counter(kernel.name for kernel in kernels)
    assert names == {"_rotate_kernel": 2, "_prefill_kernel": 6}
    assert all(kernel.spilled == 0 for kernel in kernels if kernel.name == "_rotate_kernel")
    print(sorted((kernel.shared, kernel.spilled) for kernel in kernels))
    if card in WITH_DEPENDENT_LAUNCH:
        check_waits(tmp_path, names.keys())


@pytest.mark.parametrize("card", ["9.0", "8.0", "12.0"])
def test_delta_nets(card: str, tmp_path: Path) -> None:
    """A thread's numbers are in registers, but for few where tensor cores take both operands from
    these; and what is read before the wait is another step's.
    """
    sizes = ({"K": 128, "V": 128}, {"K": 32, "V": 16})
    run(card, [{"kind": "delta net", "dtype": "bfloat16", **size} for size in sizes], tmp_path)
    kernels = compiled(tmp_path)
    check(card, "bfloat16", kernels)
    few = 0 if card == "9.0" else 128
    names = Counter(kernel.name for kernel in kernels if kernel.spilled <= few)
    assert names == {
        "_delta_decode_kernel": 3,  # of the small heads one for few and for many
        "_delta_convolve_kernel": 2,
        "_delta_chunk_kernel": 2,
        "_delta_scan_kernel": 4 if card == "9.0" else 2,
        "_delta_norm_kernel": 2,
    }
    if card in WITH_DEPENDENT_LAUNCH:
        check_waits(tmp_path, names.keys())


def written() -> set[str]:
    """The names of all kernels."""
    sources = (path.read_text() for path in (ROOT / "nanovllm" / "kernels").rglob("*.py"))
    return set(re.findall(r"^def (_\w+_kernel)\(", "".join(sources), re.MULTILINE))


def engines(card: str, dtype: str) -> Iterable[dict[str, Any]]:
    """All head and block sizes, several ranks, contexts of all numbers of splits, and products with
    biases without norms of queries and keys, experts.
    """
    options: dict[str, Any] = {"kind": "engine", "dtype": dtype, "max_model_len": 128}
    for shape in ("0.6B", "8B"):
        for head_dim in (64, 128, 256):
            for block_size in (16, 256):
                sizes = {"head_dim": head_dim, "kvcache_block_size": block_size}
                yield options | {"shape": shape} | sizes
    for K, V in ((128, 128), (64, 64), (32, 16)):
        yield {"kind": "delta net", "dtype": dtype, "K": K, "V": V}
    yield {"kind": "images", "dtype": dtype}
    options |= {"head_dim": 128, "max_num_seqs": 64}
    yield options | {"shape": "8B", "architecture": "Qwen2ForCausalLM"}
    for sparse in ("Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        yield options | {"shape": "0.6B", "architecture": sparse}
    for architecture, kind in (("Qwen3_5", "linear_attention"), ("Lfm2", "conv")):
        config = {"layer_types": [kind, "full_attention"], "conv_L_cache": 3}
        of_states = {"architecture": f"{architecture}ForCausalLM", "config": config}
        yield options | {"shape": "0.6B"} | of_states
    for shape, size in (("0.6B", 2), ("8B", 4)):
        yield options | {"shape": shape, "tensor_parallel_size": size}
    yield options | {"shape": "0.6B", "max_model_len": 40960}
    yield options | {"shape": "0.6B", "fused_kernels": False}
    yield options | {"shape": "0.6B", "quantization": "fp8"}
    yield options | {"shape": "0.6B", "quantization": "fp8", "fused_kernels": False}
    for shape, group, size in (("0.6B", 32, 1), ("0.6B", 64, 2), ("8B", 128, 1)):
        awq = {"quant_method": "awq", "bits": 4, "group_size": group}
        config = {"quantization_config": awq}
        yield options | {"shape": shape, "config": config, "tensor_parallel_size": size}
    of_experts = {"Qwen3MoeForCausalLM": awq, "GptOssForCausalLM": {"quant_method": "mxfp4"}}
    for sparse, found in of_experts.items():
        config = {"quantization_config": found}
        yield options | {"shape": "0.6B", "architecture": sparse, "config": config}
    yield options | {"shape": "0.6B", "config": {"quantization_config": in_int8("channel")}}
    if card in CONVERT_FP8:
        for head_dim in (32, 80, 128, 256):
            yield options | {"shape": "0.6B", "head_dim": head_dim, "kv_cache_dtype": "fp8"}
        # Long enough for keys to be gathered.
        yield options | {"shape": "0.6B", "kv_cache_dtype": "fp8", "max_model_len": 40960}
        for shape, size in (("8B", 1), ("0.6B", 2)):
            quantised = {"quantization": "fp8", "tensor_parallel_size": size}
            yield options | {"shape": shape} | quantised
        sparse = {"architecture": "Qwen3MoeForCausalLM", "quantization": "fp8"}
        yield options | {"shape": "0.6B"} | sparse


def invariant_engines(card: str, dtype: str) -> Iterable[dict[str, Any]]:
    """Engines with `batch_invariant`: a kernel for all heads, for states, experts and codes."""
    options: dict[str, Any] = {"kind": "engine", "dtype": dtype, "max_model_len": 128}
    options |= {"shape": "0.6B", "head_dim": 128, "batch_invariant": True}
    for head_dim in (64, 128, 256):
        yield options | {"head_dim": head_dim, "kvcache_block_size": 16}
    states = {"layer_types": ["linear_attention", "full_attention"]}
    yield options | {"architecture": "Qwen3_5ForCausalLM", "config": states}
    experts = {"quantization_config": {"quant_method": "mxfp4"}}
    yield options | {"architecture": "GptOssForCausalLM", "config": experts}
    if card in CONVERT_FP8:
        yield options | {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("dtype", MAX_SPILLED)
@pytest.mark.parametrize("card", [card for card in CARDS if card != "7.5"])
def test_every_kernel_compiles_and_fits(card: str, dtype: str, tmp_path: Path) -> None:
    if card == "gfx942" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("LLVM of Triton 3.6 cannot select an instruction of `thresholds` for it")
    jobs = [*engines(card, dtype), *invariant_engines(card, dtype)]
    assert run(card, jobs, tmp_path) == ["triton"] * len(jobs)
    kernels = compiled(tmp_path)
    check(card, dtype, kernels)
    if card in WITH_DEPENDENT_LAUNCH:
        check_waits(tmp_path, ["_own_decode_kernel", "_rms_norm_kernel"])
    wanted = written()
    fp8 = {"_quantize_kernel", "_fp8_row_kernel", "_fp8_tiles_kernel"}
    int4 = {"_int4_row_kernel", "_int4_tiles_kernel", "_numbers_kernel"}
    int8 = {"_integers_kernel", "_int8_tiles_kernel"}
    if dtype == "float32":  # whose products are the library's
        wanted -= {"_row_kernel", "_tiles_kernel"} | fp8 | int4 | int8
    elif card not in ROOMY:
        wanted -= {"_tiles_kernel", "_fp8_tiles_kernel"}
    if card not in CONVERT_FP8:
        wanted -= fp8 | {"_gather_kernel"}
    if card == "gfx942":
        wanted -= int4 | int8
    if card not in ("8.0", "8.6") or dtype == "float32":
        wanted.discard("_fp8_half_kernel")
    if card != "9.0" or dtype == "float32" or not KNOWS_GLUON:
        wanted -= OF_GLUON | {"_rows_kernel"}
    assert {kernel.name for kernel in kernels} == wanted
    of_tiles = () if dtype == "float32" else ROOMY
    for word, cards in (
        (TILE_COPY, ROOMY),
        (DEPENDENT_LAUNCH, WITH_DEPENDENT_LAUNCH),
        ("cp.async.bulk.prefetch.L2", of_tiles),
    ):
        assert any(word in kernel.text for kernel in kernels) == (card in cards), word


def test_the_oldest_triton_compiles_every_kernel(tmp_path: Path) -> None:
    """`pip install --no-deps --target DIR triton==3.4.0`, and OLDEST_TRITON=DIR. It failed at a
    loop of scalars, and at its own functions for dependent launch.
    """
    directory = os.environ.get("OLDEST_TRITON")
    if directory is None:
        pytest.skip("needs OLDEST_TRITON, a directory with the oldest Triton of pyproject.toml")
    jobs = [*engines("9.0", "bfloat16"), *invariant_engines("9.0", "bfloat16")]
    assert run("9.0", jobs, tmp_path, directory) == ["triton"] * len(jobs)
    compiled_by_it = {path.stem for path in tmp_path.glob("*/*_kernel.ptx")}
    assert compiled_by_it == written() - {"_fp8_half_kernel", "_rows_kernel"} - OF_GLUON


def test_gpu_without_kernels_answers_as_a_cpu(tmp_path: Path) -> None:
    """Below 8.0 `auto` is PyTorch, and no kernel of ours is compiled for anything: sampling,
    controls, log-probabilities. A prefill of 16 bits wants 98,304 bytes there, of 65,536.
    """
    options: dict[str, Any] = {"num_kvcache_blocks": 64, "max_num_seqs": 8, "dtype": "float32"}
    options |= {"max_num_batched_tokens": 64, "max_model_len": 64}
    [[backend, answers]] = run("7.5", [{"kind": "generate", "model": TINY} | options], tmp_path)
    assert backend == "torch" and not compiled(tmp_path)
    with LLM(TINY, device="cpu", **options) as llm:
        params = [SamplingParams(max_tokens=4, seed=5, **own) for own in CONTROLS]
        outputs = llm.generate([[7] * 40] * len(params), params, use_tqdm=False)
    assert answers == [output["token_ids"] for output in outputs]
