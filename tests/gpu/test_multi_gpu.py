"""Tensor parallelism on several CUDA devices: sums inside kernels, beside copies, and by NCCL."""

import functools
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import quantised_copy
from tiny_reference import MAX_TOKENS, assert_greedy, make_prompts
from transformers import Qwen3ForCausalLM

from checkpoints import copy_checkpoint, qwen3_06b_config, tokens
from faults import (
    CONNECT,
    CONNECT_NCCL,
    DEADLINE,
    FAULTS,
    LOAD,
    PROMISE,
    SIZE,
    nccl_threads,
    shared_memory,
    traces,
    wait_until,
    within_deadline,
)
from nanovllm import LLM, SamplingParams, WorkerError
from nanovllm.distributed.nccl import Nccl
from nanovllm.layers.embed_head import ParallelLMHead

os.environ["NCCL_SET_THREAD_NAME"] = "1"  # NCCL reads it once: for `nccl_threads`

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]
SEED = 11
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SMALL: dict[str, Any] = {"num_kvcache_blocks": 256, "max_num_seqs": 64}


def fewer_than(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


SIZES = [2, pytest.param(4, marks=fewer_than(4))]
MODES: dict[str, dict[str, Any]] = {  # every way of summing, and the switches beside them
    "all": {},
    "nccl": {"disable_custom_all_reduce": True},
    "eager": {"enforce_eager": True},
    "synchronous": {"overlap": False},
    "plain-kernels": {"fused_kernels": False},
    "large-steps": {"max_num_seqs": 4},  # of more rows than kernels exchange
    "owners": {},  # of what kernels exchange, one rank adds each row
}


@pytest.fixture
def owners_add(mode: str, inject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum in the mode of that name, on all ranks."""
    if mode == "owners":
        code = "from nanovllm.kernels import all_reduce; all_reduce.TWO_SHOT_MIN_BYTES = 0"
        inject(CONNECT, code, rank=None)
        monkeypatch.setattr("nanovllm.kernels.all_reduce.TWO_SHOT_MIN_BYTES", 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_float32_tokens_are_those_of_the_reference(
    size: int, mode: str, tiny: str, reference: Any, owners_add: None
) -> None:
    """Chunked prefill beside decodes, and a pool so small that sequences wait."""
    prompts = make_prompts()
    options = {**SMALL, "max_num_batched_tokens": 64, "num_kvcache_blocks": 90, **MODES[mode]}
    with LLM(
        tiny, dtype="float32", kvcache_block_size=16, tensor_parallel_size=size, **options
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        metrics = llm.metrics()
    assert metrics["tensor_parallel_size"] == size
    assert (metrics["num_graph_replays"] > 0) == (mode != "eager")
    by_nccl = mode in ("nccl", "plain-kernels")
    assert metrics["all_reduce"] == ("nccl" if by_nccl else "peer memory and nccl")
    assert_greedy(reference, prompts, tokens(outputs))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers in the width of Qwen3-0.6B."""
    torch.manual_seed(SEED)
    changes = {"num_hidden_layers": 4, "max_position_embeddings": 4096}
    config = qwen3_06b_config(tie_word_embeddings=False, **changes)
    path: Path = tmp_path_factory.mktemp("wide")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def partly_in_fp8(wide: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same in FP8 but for some layers, and with the numbers that the codes mean: norms give
    rows in 16 bits and in 8, and products take both.
    """
    directory = tmp_path_factory.mktemp("partly")
    exact = copy_checkpoint(Path(wide), directory / "exact")
    left = ["layers.1", "layers.2.mlp.down_proj", "layers.3.self_attn"]
    path = quantised_copy(
        exact,
        directory / "quantised",
        "blocks",
        lambda module: any(f".{name}." in f"{module}." for name in left),
        {"weight_block_size": [128, 128], "modules_to_not_convert": left},
    )
    return str(path), str(exact)


@pytest.mark.parametrize("mode", ["all", "nccl", "fp8", "partly in fp8"])
@pytest.mark.parametrize("size", [*SIZES, pytest.param(8, marks=fewer_than(8))])
def test_log_probabilities_of_large_and_small_steps(
    size: int,
    mode: str,
    wide: str,
    partly_in_fp8: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 0.05 of transformers in bf16: steps of thousands of rows, whose sums hide behind the
    products, of a few hundred, and graph decode; of so many that owners sum, on more than two. With
    three bits of mantissa, where bf16 has seven, within 16 times as much.
    """
    from nanovllm.kernels.all_reduce import sums_by_owner
    from nanovllm.kernels.device_features import has_own_kernels
    from nanovllm.kernels.products import gated

    rng = random.Random(SEED)
    taps: list[torch.Tensor] = []
    buffer = torch.zeros(128, 1024, dtype=torch.bfloat16, device="cuda")
    forward = ParallelLMHead.forward

    def tapped(head: ParallelLMHead, hidden: torch.Tensor, *out: Any) -> torch.Tensor:
        n = min(128, len(hidden))
        buffer[:n].copy_(hidden[:n])  # also out of graphs
        return forward(head, hidden, *out)

    monkeypatch.setattr(ParallelLMHead, "forward", tapped)
    rows, gated_product = [], gated.gated_product

    def spy(x: Any, *args: Any) -> Any:
        out = gated_product(x, *args)
        rows.append(len(x) if out is not None else 0)
        return out

    monkeypatch.setattr(gated, "gated_product", spy)
    path, exact = partly_in_fp8 if mode == "partly in fp8" else (wide, wide)
    reference = Qwen3ForCausalLM.from_pretrained(exact, torch_dtype=torch.bfloat16).cuda()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    worst, most = 0.0, 0.8 if "fp8" in mode else 0.05
    how = {"quantization": "fp8"} if "fp8" in mode else MODES[mode]
    options = {**SMALL, **how, "overlap": False, "tensor_parallel_size": size}
    batches = [
        [900, 700, 650, 333],
        [3000],
        [1600, 1500, 1400],  # gate and up projections of FP8 activate parts of these on Hopper
        [300, 20, 1],
        [100, 20, 1],
        [129],
        [65],
        [9],
        [20] * 100,
    ]
    with LLM(path, **{**options, "max_num_seqs": 128}) as llm:
        peers = llm.model_runner.built.build.group.peers
        assert (mode != "nccl" and size > 2) == sums_by_owner(peers, 100)
        rows.clear()  # of warm-up
        for lengths in batches:
            prompts = [[rng.randrange(10000) for _ in range(n)] for n in lengths]
            for prompt in prompts:
                llm.add_request(prompt, params)
            outputs, taps = [], []
            while not llm.is_finished():
                outputs += llm.step()
                taps.append(buffer[: len(prompts)].clone())
            outputs.sort(key=lambda output: output.request_id)
            assert len(taps) == 3
            for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                out = output["token_ids"]
                hidden = torch.stack([tap[row] for tap in taps])
                with torch.no_grad():
                    got = reference.lm_head(hidden).float().log_softmax(-1)
                    ids = torch.tensor([prompt + out[:-1]], device="cuda")
                    wanted = reference(ids).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
                steps = torch.arange(len(out), device="cuda")
                worst = max(worst, float((got - wanted)[steps, out].abs().max()))
                assert float((wanted.max(-1).values - wanted[steps, out]).max()) < most
        assert llm.metrics()["num_graph_replays"] > 0
    if size == 2 and has_own_kernels(buffer):  # parts of more have fewer rows than FP8 wants
        assert max(rows) > gated.MANY
    print(size, mode, "largest difference of a log-probability:", worst)
    assert worst < most


@pytest.mark.parametrize("size", SIZES)
def test_sampled_tokens_follow_the_request_not_the_number_of_gpus(size: int, tiny: str) -> None:
    prompts = make_prompts()[:16]
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = []
    for ranks in (1, size):
        with LLM(tiny, dtype="float32", tensor_parallel_size=ranks, **SMALL) as llm:
            drawn = llm.generate(prompts, params, use_tqdm=False)
            outputs.append([output["token_ids"] for output in drawn])
    assert outputs[0] == outputs[1]


POOL: dict[str, Any] = {**SMALL, "num_kvcache_blocks": 16384}  # at least 1 GiB on each rank
TOLERANCE = 24 << 20  # bytes of a GPU, for what CUDA and PyTorch keep
WHEN = (0.1, 0.4)  # seconds
LATER = "import threading; threading.Timer({}, lambda: os.kill(os.getpid(), 9)).start()"


def answer(path: str, **options: Any) -> str:
    with LLM(path, **options) as llm:
        return str(llm.generate("127+345=", GREEDY, use_tqdm=False)[0]["text"])


def free() -> list[int]:
    """Bytes of each GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]


@pytest.fixture(scope="module")
def warm(tiny: str) -> None:
    """Start whatever CUDA, NCCL and cuBLAS (in each of two threads) start once and keep."""
    for size in (2, 4)[: torch.cuda.device_count() // 2]:
        use = functools.partial(answer, tiny, tensor_parallel_size=size, **POOL)
        assert use() == within_deadline(use) == "472"


@pytest.fixture
def nothing_left(warm: None) -> Iterator[None]:
    """Afterwards there is no process, thread, port or file more, and no memory less on any GPU."""

    def found() -> set[Any]:
        names = shared_memory().union(name for name in os.environ if "NCCL" in name)
        return names.union(*traces().values())

    before, free_before = found(), free()
    yield
    try:
        wait_until(lambda: found() <= before)  # NCCL's own threads end a moment later
    finally:
        print("left:", found() - before)
    lost = [a - b for a, b in zip(free_before, free(), strict=True)]
    print("bytes lost:", lost)
    assert max(lost) < TOLERANCE


def die(inject: Any, where: str, fault: str, rank: int, options: Any, path: str) -> WorkerError:
    """The error of an engine that is not built, since a worker has died. It comes in time."""
    died = inject(where, fault, rank=rank)
    with pytest.raises(WorkerError) as caught:
        within_deadline(lambda: LLM(path, **options))
    took = time.monotonic() - float(died.read_text())
    print(f"{took:.2f} s from the fault to the error")
    assert took < PROMISE
    return caught.value


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [
        FAULTS["GPU memory"][:2],
        FAULTS["kill"][:2],
        *((LATER.format(t), -9) for t in WHEN),
    ],
    ids=["GPU memory", "kill", *(f"kill {t} s later" for t in WHEN)],
)
def test_defect_13_death_while_nccl_connects(
    fault: str,
    exit_code: int,
    size: int,
    inject: Any,
    tiny: str,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: None,
) -> None:
    """Rank 0 waited for it for ever, or for a minute, and so did the next engine of the process;
    and what had been connected was lost.
    """
    options = {"tensor_parallel_size": size, **POOL}
    connecting, abort = [], Nccl.abort

    def watched(nccl: Nccl) -> None:
        wait_until(lambda: nccl._handle)
        connecting.append(nccl._calling.locked())
        abort(nccl)

    monkeypatch.setattr(Nccl, "abort", watched)
    error = die(inject, CONNECT_NCCL, fault, size - 1, options, tiny)
    print("NCCL was connecting:", connecting)
    assert connecting == [True] or "Timer" in fault
    monkeypatch.undo()
    assert (error.rank, error.exit_code) == (size - 1, exit_code)
    assert within_deadline(lambda: answer(tiny, **options)) == "472"


@pytest.mark.parametrize("where", [CONNECT, LOAD, SIZE])
def test_defect_13_death_before_and_after_nccl_connects(
    where: str, inject: Any, tiny: str, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    """Rank 0 waits for one that has not begun to connect, or for what the ranks exchange then."""
    options = {"tensor_parallel_size": 2, **POOL}
    error = die(inject, where, FAULTS["kill"][0], 1, options, tiny)
    monkeypatch.undo()
    assert (error.rank, error.exit_code) == (1, -9)
    assert within_deadline(lambda: answer(tiny, **options)) == "472"


FIRST = """
import os, sys
from nanovllm import LLM, WorkerError
sys.path.append(sys.argv[1])
from faults import listeners, nccl_threads, wait_until
options = {"tensor_parallel_size": 2, "num_kvcache_blocks": 256, "max_num_seqs": 64}
try:
    LLM(sys.argv[2], **options)
except WorkerError as error:
    print(error.exit_code)
wait_until(lambda: not listeners() and not nccl_threads())
os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
with LLM(sys.argv[2], **options) as llm:
    print(llm.generate("127+345=", use_tqdm=False)[0]["text"], bool(nccl_threads()))
wait_until(lambda: not listeners() and not nccl_threads())
"""


def test_defect_13_death_in_the_first_engine_of_a_process(inject: Any, tiny: str) -> None:
    """NCCL's first connection started a thread and opened two ports for good."""
    inject(CONNECT_NCCL, LATER.format(WHEN[0]))
    done = subprocess.run(
        [sys.executable, "-c", FIRST, str(Path(__file__).parents[1]), tiny],
        stdout=subprocess.PIPE, text=True, check=True, timeout=2 * DEADLINE,
    )  # fmt: skip
    assert done.stdout.split() == ["-9", "472", "True"]


@pytest.mark.parametrize("end", ["exit", "del", "Ctrl-C"])
def test_defect_14_every_end_gives_all_back(
    end: str, tiny: str, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    """Memory of the GPUs, ports, files and processes, in a process that goes on."""
    before = free()
    llm = LLM(tiny, tensor_parallel_size=2, **POOL)
    assert min(a - b for a, b in zip(before[:2], free(), strict=False)) > 1 << 30
    assert nccl_threads()
    llm.add_request([5] * 100, GREEDY)
    llm.step()
    if end == "Ctrl-C":
        run = llm.model_runner.launch

        def interrupted(*args: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return run(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llm.model_runner, "launch", interrupted)
            llm.step()
        del run
    if end != "del":
        llm.exit()
    del llm


@pytest.mark.parametrize(
    ("moment", "mode"),
    [
        *itertools.product(["prefill", "decode", "between"], ["all", "nccl", "eager"]),
        ("decode", "owners"),
    ],
)
def test_defect_13_a_killed_worker_is_an_error_and_leaves_nothing(
    moment: str,
    mode: str,
    tiny: str,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: None,
    owners_add: None,
) -> None:
    """Kernels of rank 0 that wait for the dead are ended, the memory comes back, and another
    engine works."""
    options = {"tensor_parallel_size": 2, **MODES[mode], **POOL}
    llm = LLM(tiny, **options)
    [worker] = llm.executor._workers._workers
    run, calls = llm.model_runner.launch, []

    def killing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == {"prefill": 1, "decode": 5}[moment]:
            os.kill(worker.process.pid, signal.SIGKILL)
        return run(*args)

    if moment == "between":
        llm.add_request(list(range(200)), GREEDY)
        llm.step()
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    else:
        monkeypatch.setattr(llm.model_runner, "launch", killing)
    many = [[5] * 100] * 20, SamplingParams(max_tokens=500, ignore_eos=True), False
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL") as error:
        while moment == "between":
            within_deadline(llm.step)
        within_deadline(lambda: llm.generate(*many))
    assert (error.value.rank, error.value.exit_code) == (1, -9)
    with pytest.raises(RuntimeError, match="closed"):
        llm.step()
    monkeypatch.undo()
    assert not os.path.exists(f"/proc/{worker.process.pid}")
    assert not os.listdir("/dev/shm")
    assert answer(tiny, **options) == "472"


CRASH = """
import os, signal, sys
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, num_kvcache_blocks=256, max_num_seqs=64)
print(llm.executor._workers._workers[0].process.pid, os.listdir("/dev/shm"), flush=True)
llm.add_request([5] * 100, SamplingParams(max_tokens=500, ignore_eos=True))
llm.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_defect_12_a_crash_of_the_caller_leaves_nothing(tiny: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, tiny], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    worker, names = done.stdout.split(maxsplit=1)
    assert names.strip() == "[]"
    wait_until(lambda: not os.path.exists(f"/proc/{worker}"))
    assert not os.listdir("/dev/shm")


def test_defect_12_two_engines_at_once(tiny: str) -> None:
    options = {"tensor_parallel_size": 2, **SMALL}
    engines = [LLM(tiny, **options) for _ in range(2)]
    for llm in engines:
        for _ in range(3):
            llm.add_request("127+345=", GREEDY)
    texts: list[str] = []
    while not all(llm.is_finished() for llm in engines):
        for llm in engines:
            texts += [output["text"] for output in llm.step()]
    for llm in engines:
        llm.exit()
    assert texts == ["472"] * 6


@pytest.mark.parametrize(
    ("replicas", "ranks"), [(2, 1), pytest.param(2, 2, marks=fewer_than(4))], ids=["2", "2 of TP=2"]
)
def test_replicas_have_gpus_of_their_own(
    replicas: int,
    ranks: int,
    tiny: str,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: None,
) -> None:
    """Graphs on each; one is killed in the middle, and its requests are computed by the other."""
    prompts, before = make_prompts(), free()
    options = {**POOL, "tensor_parallel_size": ranks, "dtype": "float32"}
    with LLM(tiny, data_parallel_size=replicas, **options) as llm:
        taken = [a - b for a, b in zip(before, free(), strict=True)]
        assert min(taken[: replicas * ranks]) > 1 << 30
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_greedy(reference, prompts, tokens(outputs))
        each = llm.metrics()["replicas"].values()
        assert min(metrics["num_graph_replays"] for metrics in each) > 0
        step, killed = llm.core.step, []

        def killing() -> None:
            step()
            if not killed and llm.core.metrics.num_finished > 1.2 * len(prompts):
                killed.append(llm.executor._replicas[0].process.pid)
                os.kill(killed[0], signal.SIGKILL)

        with monkeypatch.context() as patch:
            patch.setattr(llm.core, "step", killing)
            outputs = within_deadline(lambda: llm.generate(prompts, GREEDY, use_tqdm=False))
        assert killed
        assert_greedy(reference, prompts, tokens(outputs))
        wait_until(lambda: llm.step() is None or len(llm.executor.ready) == replicas)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_greedy(reference, prompts, tokens(outputs))
        restarted = llm.metrics()["replicas"]["0"]
        assert (restarted["num_finished"] > 0, llm.executor.num_restarts) == (True, 1)
