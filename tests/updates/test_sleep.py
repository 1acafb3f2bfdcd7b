"""Sleep and wake: tokens are the same afterwards, memory goes and comes, nothing else is lost."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from new_weights import PROMPTS, results, two_checkpoints
from safetensors.torch import load_file

from checkpoints import SMALL, greedy, make_checkpoint, rare, tokens
from faults import FAULTS, wait_until
from nanovllm import LLM, AsyncLLM
from nanovllm.device_memory.pieces import Piece
from nanovllm.layers.weights import onednn
from nanovllm.replicas.messages import Ended
from nanovllm.replicas.supervisor import Replicas
from nanovllm.updates import settling

OPTIONS: dict[str, Any] = {**SMALL, "num_kvcache_blocks": 64, "enable_sleep_mode": True}
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape, with a tied head."""
    return two_checkpoints(tmp_path_factory.mktemp("sleep"), tie_word_embeddings=True)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def resident() -> int:
    """Bytes of this process that are in physical memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


EVERYWHERE = [{}, {"tensor_parallel_size": 2}, rare({"data_parallel_size": 2})]


@pytest.mark.parametrize("packed", [False, rare(True)])
@pytest.mark.parametrize("options", EVERYWHERE)
def test_tokens_are_the_same_after_sleep(
    options: dict[str, int],
    packed: bool,
    paths: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights in pieces, or in oneDNN's layout (in this process alone)."""
    monkeypatch.setattr(onednn, "MIN_WEIGHT", 0 if packed else 2**30)
    with LLM(paths[0], **OPTIONS, **options) as llm:
        before = results(llm)
        llm.update_weights(tensors_of(paths[1]))  # test_new_weights.py has a fresh engine of these
        after = results(llm)
        llm.update_weights(tensors_of(paths[0]))
        assert before != after and not llm.is_sleeping()
        llm.sleep()
        assert llm.is_sleeping()
        llm.sleep()  # it does already
        for use in (lambda: llm.generate([1]), llm.step, lambda: llm.score([[1, 2]])):
            with pytest.raises(RuntimeError, match=r"the engine sleeps: call wake_up\(\) first"):
                use()
        llm.wake_up()
        assert not llm.is_sleeping()
        assert results(llm) == before, "from the beginning: nothing is cached"
        llm.sleep(level=2)
        with pytest.raises(RuntimeError, match=r'call wake_up\(tags=\["weights"\]\) first'):
            llm.update_weights(tensors_of(paths[1]))
        llm.wake_up(tags=["weights"])
        llm.update_weights(tensors_of(paths[1]))
        assert llm.is_sleeping()
        with pytest.raises(RuntimeError, match="its KV cache has no memory"):
            llm.generate([1])
        llm.wake_up(tags=["kv_cache"])
        assert results(llm) == after
        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(RuntimeError, match=r"dropped by sleep\(level=2\): bring new ones"):
            llm.generate([1])
        llm.update_weights(tensors_of(paths[0]))
        assert results(llm) == before


def test_memory_goes_and_comes(tmp_path: Path) -> None:
    """Of weights of 37 MB and a KV cache of 16 MB, which this engine has filled."""
    shape = {"hidden_size": 512, "intermediate_size": 128, "vocab_size": 8192}
    path = make_checkpoint(tmp_path / "model", **shape)
    size = 2 * (128 * 512 * 3 + 512 * 128 * 6) * 4 + 2 * 8192 * 512 * 4
    options = {**OPTIONS, "num_kvcache_blocks": 512, "fused_kernels": False}
    prompts = [[(i * j) % 4093 for j in range(1, 120)] for i in range(60)]
    with LLM(path, **options) as llm:
        pool = llm.model_runner.built.pool
        llm.generate(prompts, greedy(2), use_tqdm=False)
        cached = pool.num_bytes(512)
        awake = resident()
        llm.sleep()
        assert awake - resident() > 0.8 * cached, "level 1 keeps the weights"
        llm.wake_up()
        llm.generate(prompts, greedy(2), use_tqdm=False)
        assert resident() > awake - 0.2 * cached
        llm.sleep(level=2)
        assert awake - resident() > 0.8 * (cached + size)


def test_a_piece_that_was_given_back_is_empty() -> None:
    """The pages of a shared mapping would keep what was in them, beyond what a process seems to
    take.
    """
    piece = Piece(1 << 22, torch.device("cpu"))
    piece.bytes.fill_(7)
    piece.give_back()
    piece.take()
    assert not piece.bytes.any()


@pytest.mark.slow  # half a minute
def test_a_thousand_cycles(paths: tuple[Path, Path]) -> None:
    """Equal tokens each time; no thread, descriptor or memory more."""
    tensors = [tensors_of(path) for path in paths]
    prompt = list(range(40))

    def found(llm: LLM) -> list[int]:
        return llm.generate([prompt], greedy(3), use_tqdm=False)[0]["token_ids"]

    with LLM(paths[0], **OPTIONS) as llm:
        wanted = [found(llm)]
        llm.update_weights(tensors[1])
        wanted.append(found(llm))
        assert wanted[0] != wanted[1]
        sizes = []
        for i in range(1000):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.update_weights(tensors[i % 2])
            llm.wake_up(tags=["kv_cache"])
            assert found(llm) == wanted[i % 2]
            if i in (200, 999):
                sizes.append((resident(), len(os.listdir("/proc/self/fd"))))
        assert sizes[1][0] - sizes[0][0] < 8 << 20 and sizes[1][1] <= sizes[0][1]
        assert llm.weight_version == 1001


def test_requests_that_run_wait_for_the_end_of_sleep(paths: tuple[Path, Path]) -> None:
    prompt = list(range(20))
    with LLM(paths[0], **OPTIONS) as llm:
        [wanted] = llm.generate([prompt], greedy(60), use_tqdm=False)

    async def run() -> list[int]:
        async with AsyncLLM(paths[0], **OPTIONS) as llm:
            outputs = llm.generate(prompt, greedy(60))
            first = await anext(outputs)
            assert not first.finished
            await llm.sleep()
            assert await llm.is_sleeping()
            with pytest.raises(RuntimeError, match="the engine sleeps"):
                await anext(llm.generate(prompt))
            await llm.wake_up()
            last = [output async for output in outputs][-1]
            return last["token_ids"]

    assert asyncio.run(run()) == wanted["token_ids"]


@pytest.mark.slow  # a restart without sleep is in test_replicas.py
@pytest.mark.parametrize("updated", [False, True])
def test_replicas_are_restarted_after_sleep(
    updated: bool, paths: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """None was after the first sleep, and one that was starting was killed. None starts meanwhile:
    the memory is lent, and it would miss an update.
    """
    with LLM(paths[updated], **OPTIONS) as fresh:
        wanted = tokens(fresh.generate(PROMPTS, greedy(20), use_tqdm=False))
    with LLM(paths[0], data_parallel_size=2, **OPTIONS) as llm:
        replicas = llm.executor
        assert isinstance(replicas, Replicas)

        def kill(number: int) -> None:
            replicas._replicas[number].process.kill()
            wait_until(lambda: any(isinstance(each, Ended) for _, each in [*replicas._inbox]))
            llm.metrics()  # notices that

        kill(0)
        assert replicas.ready == [1] and replicas.num_restarts == 1
        llm.sleep()
        assert replicas.ready == [0, 1], "it does not wait for the start"
        kill(1)
        assert not replicas.are_starting and replicas.num_restarts == 1
        assert "restarted when the engine goes on" in caplog.text
        llm.wake_up(tags=["weights"])
        with pytest.raises(ValueError, match="the model has no tensor x"):
            llm.update_weights(iter([("x", torch.empty(1))]))
        if updated:
            llm.update_weights(tensors_of(paths[1]))
        llm.wake_up()
        assert replicas.are_starting is not updated
        assert replicas.num_restarts == 1 + (not updated)
        assert ("replica 1 is not restarted: the weights" in caplog.text) is updated
        assert tokens(llm.generate(PROMPTS, greedy(20), use_tqdm=False)) == wanted


@pytest.mark.parametrize("size", [2, rare(1)])
def test_without_memory_the_engine_sleeps_on(
    size: int, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, inject: Any
) -> None:
    """Whichever rank lacks it, all give back what they have taken: two ranks were closed."""
    take, room, everything = Piece.take, 0, 1000

    def take_if_there_is_room(piece: Piece) -> None:
        nonlocal room
        if not room:
            raise torch.OutOfMemoryError("none left")
        take(piece)
        room -= 1

    inject("nanovllm.device_memory.pieces:Piece.take", FAULTS["GPU memory"][0], rank=None)
    monkeypatch.setattr(Piece, "take", take_if_there_is_room)
    monkeypatch.setattr(settling, "SMALL", 1)  # a piece for each parameter
    with LLM(paths[0], tensor_parallel_size=size, **OPTIONS) as llm:
        before = results(llm)
        sleeper = llm.model_runner.built.sleeper
        assert sleeper is not None and len(sleeper._weights) > 3
        llm.sleep(level=2)
        # Rank 1 lacks it, then this one does: of the weights, then of the KV cache alone.
        of_others = [(everything, "weights", 0)] * (size - 1)
        own = [(3, "weights", 0), (len(sleeper._weights), "kv_cache", len(sleeper._weights))]
        for free, missing, held in (*of_others, *own):
            room = free
            with pytest.raises(torch.OutOfMemoryError, match=rf"enough memory for {missing}"):
                llm.wake_up()
            assert llm.is_sleeping()
            pieces = [*sleeper._weights, *sleeper._others]
            assert sum(piece.is_there for piece in pieces) == held
        room = everything
        llm.wake_up()
        llm.update_weights(tensors_of(paths[0]))
        assert results(llm) == before


def test_mistakes(paths: tuple[Path, Path]) -> None:
    with LLM(paths[0], **{**OPTIONS, "enable_sleep_mode": False}) as llm:
        with pytest.raises(ValueError, match="built with enable_sleep_mode=True"):
            llm.sleep()
        llm.wake_up()
    with LLM(paths[0], **OPTIONS) as llm:
        for level in (0, 3):
            with pytest.raises(ValueError, match="`level` must be"):
                llm.sleep(level)
        with pytest.raises(ValueError, match="`tags` must be"):
            llm.wake_up(tags=["graphs"])
        with pytest.raises(TypeError, match=r"must be a list of tags, got 'weights': pass \['weig"):
            llm.wake_up("weights")
        llm.add_request([1])
        with pytest.raises(RuntimeError, match="while requests are left"):
            llm.sleep()
    with LLM(paths[0], **OPTIONS) as llm:
        llm.sleep()
    assert llm.is_closed


@pytest.mark.parametrize("options", [{}, rare({"data_parallel_size": 2})])
@pytest.mark.parametrize("method", ["hold", "release"])
def test_ctrl_c_as_the_engine_falls_asleep_or_wakes(
    method: str,
    options: dict[str, int],
    paths: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It left replicas that computed nothing, for ever, in an engine that was awake."""
    with LLM(paths[0], **OPTIONS, **options) as llm:
        before = results(llm)
        done = getattr(llm.core, method)

        def interrupted(*args: Any) -> None:
            if method == "release":
                signal.raise_signal(signal.SIGINT)
            done(*args)
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(llm.core, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.sleep()
                llm.wake_up()
        assert llm.is_sleeping() == (method == "hold")
        llm.wake_up()
        assert not llm.is_sleeping() and not llm.core.is_held
        if isinstance(llm.executor, Replicas):
            assert not llm.executor.are_held, "it would restart none any more"
        assert results(llm) == before


@pytest.mark.parametrize("use", ["sleep", "start_weight_update", "update_weights"])
def test_ctrl_c_ends_the_wait_for_a_replica_that_starts(
    use: str, paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is held yet: starts take long."""
    with LLM(paths[0], **OPTIONS) as llm:
        before = results(llm)
        reached = []

        def starts() -> None:
            signal.raise_signal(signal.SIGINT)
            reached.append("the end of the wait")

        args = [tensors_of(paths[1])] if use == "update_weights" else []
        with monkeypatch.context() as patch:
            patch.setattr(llm.core, "prepare_to_hold", starts)
            with pytest.raises(KeyboardInterrupt):
                getattr(llm, use)(*args)
        assert not reached and not llm.core.is_held and not llm.is_sleeping()
        llm.reset_prefix_cache()
        assert results(llm) == before


def test_a_refused_update_does_not_bring_lost_weights_back(paths: tuple[Path, Path]) -> None:
    with LLM(paths[0], **OPTIONS) as llm:
        before = results(llm)
        llm.sleep(level=2)
        llm.wake_up()
        for tensors in ({"x": torch.empty(1)}, iter([("x", torch.empty(1))])):
            with pytest.raises(ValueError, match="the model has no tensor x"):
                llm.update_weights(tensors)
            with pytest.raises(RuntimeError, match="have been dropped by sleep"):
                llm.generate(PROMPTS, greedy(2), use_tqdm=False)
        llm.unload_adapter()
        assert results(llm) == before
