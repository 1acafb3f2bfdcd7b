"""`nanovllm bench`, and example.py as users run it."""

import argparse
import json
import math
import re
import runpy
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import train_text
import train_tiny

import example
import nanovllm
from benchmarks import accuracy
from nanovllm import LLM
from nanovllm.benchmark import harness
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.cli import bench
from nanovllm.cli.main import main

ROOT = Path(__file__).parents[2]
SHORT = 778  # seed of a workload whose first sequence is short


def argv(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *args])


# -- bench ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "total"), [(0, 133966), (1, 156222), (2, 140460)])
def test_the_workload_is_that_of_nano_vllm(seed: int, total: int) -> None:
    """The totals that nano-vLLM's bench.py prints: other draws make figures incomparable."""
    prompts, params = harness.workload(256, seed, 151936)
    assert sum(p.max_tokens for p in params) == total
    assert len(prompts) == len(params) == 256
    lengths = [len(prompt) for prompt in prompts] + [p.max_tokens for p in params]
    assert 100 <= min(lengths) < 120 and 1000 < max(lengths) <= 1024
    ids = {token for prompt in prompts for token in prompt}
    assert min(ids) == 0 and max(ids) == 10000 and len(ids) == 10001
    assert {(p.temperature, p.ignore_eos) for p in params} == {(0.6, True)}
    folded, _ = harness.workload(256, seed, 272)
    assert folded == [[token % 272 for token in prompt] for prompt in prompts]


def test_bench_reports_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: str
) -> None:
    """The prefix cache of the first run must not serve the second."""
    seen: list[tuple[int, int]] = []
    run_once = harness.run_once

    def recording(llm: LLM, *args: Any, **kwargs: Any) -> Any:
        before = llm.metrics()["num_prefill_tokens"]
        result = run_once(llm, *args, **kwargs)
        seen.append((llm.metrics()["num_prefill_tokens"] - before, result[0]))
        return result

    monkeypatch.setattr(harness, "run_once", recording)
    options = ["--num-seqs", "1", "--repeat", "2", "--no-progress", "--seed", str(SHORT)]
    options += ["--model", tiny, "--device", "cpu", "--kvcache-block-size", "64"]
    assert main(["bench", *options]) == 0
    out, err = capsys.readouterr()
    *lines, last = out.strip().splitlines()
    assert "req" not in err
    prompts, params = harness.workload(1, SHORT, 272)
    tokens = sum(p.max_tokens for p in params)
    assert seen == [(sum(map(len, prompts)), tokens)] * 2
    assert [line.split(" in ")[0] for line in lines[-2:]] == [f"{tokens} tokens"] * 2
    result = json.loads(last)
    low, high = result["tok_per_s_range"]
    assert 0 < low <= result["tok_per_s_median"] <= high
    assert result["tok_per_s_median"] == pytest.approx(statistics.mean((low, high)), abs=0.2)
    for key in ("construction_s", "commit", "nanovllm", "torch", "python", "hardware"):
        assert key in result
    expected = {
        "benchmark": "bench",
        "model": tiny,
        "seed": SHORT,
        "num_seqs": 1,
        "tokens": tokens,
        "attention_backend": "torch",
        "device": "cpu",
        "dtype": "float32",
        "cuda_graphs": 0,
        "num_preemptions": 0,
        "num_cached_tokens": 0,
    }
    assert {key: result[key] for key in expected} == expected
    assert result["num_kvcache_blocks"] > 0


def num_parameters(config: ModelConfig) -> int:
    M, D = config.hidden_size, config.head_dim
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = heads * D * M + 2 * D + 3 * M * config.intermediate_size + 2 * M
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * M
    return embeddings + config.num_hidden_layers * layer + M


@pytest.mark.parametrize(
    ("shape", "count"),
    [("qwen3-0.6b", 596_049_920), ("qwen3-4b", 4_022_468_096), ("qwen3-8b", 8_190_735_360)],
)
def test_dummy_shapes_are_the_published_ones(
    shape: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of parameters are those on the model cards."""
    built: dict[str, Any] = {}

    def stub(directory: str, **options: Any) -> SimpleNamespace:
        built.update(options, config=ModelConfig.from_pretrained(directory))
        return SimpleNamespace()

    monkeypatch.setattr(nanovllm, "LLM", stub)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = ["--dummy", shape, "--attention-backend", "triton", "--enforce-eager"]
    bench.build(parser.parse_args(args))
    config = built.pop("config")
    assert num_parameters(config) == count
    assert (config.layers[0].rope.rope_theta, config.rms_norm_eps, config.dtype) == (
        1e6,
        1e-6,
        "bfloat16",
    )
    assert (config.head_dim, config.num_key_value_heads, config.vocab_size) == (128, 8, 151936)
    options = {"attention_backend": "triton", "enforce_eager": True}
    assert built == {"load_format": "dummy", **options}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--repeat", "0"], "--repeat: must be at least 1, got 0"),
        (["--num-seqs", "-1"], "--num-seqs: must be at least 1, got -1"),
        (["--num-seqs", "x"], "--num-seqs: must be an integer, got 'x'"),
        (["--dummy", "qwen9"], "--dummy: invalid choice"),
        (["--dummy", "qwen3-8b", "--model", "x"], "not allowed with"),
    ],
)
def test_bench_refuses_nonsense(
    args: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(nanovllm, "LLM", None)  # must not be reached
    with pytest.raises(SystemExit) as error:
        main(["bench", *args])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


# -- all scripts ----------------------------------------------------------------------------------

SCRIPTS = [
    path
    for path in sorted([ROOT / "bench.py", ROOT / "example.py", *ROOT.glob("[bes]*/*.py")])
    if "__main__" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_explain_their_options(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that need a GPU: `--help` ended in tracebacks, and options had no text."""
    source = script.read_text("utf-8")
    named = re.findall(r"^(?:import|from) (ray|fastapi|lm_eval|nanovllm\.serve)\b", source, re.M)
    for package in named:
        pytest.importorskip({"nanovllm.serve": "starlette"}.get(package, package))
    options: list[argparse.Action] = []
    parse = argparse.ArgumentParser.parse_args

    def recording(parser: argparse.ArgumentParser, *args: Any) -> argparse.Namespace:
        options.extend(parser._actions)
        return parse(parser, *args)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", recording)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out
    assert [option.dest for option in options if not option.help] == []


# -- example.py -----------------------------------------------------------------------------------


def completions(out: str) -> dict[str, str]:
    blocks = out.strip().split("\n\n")
    pairs = [block.removeprefix("Prompt:     ").split("\nCompletion: ", 1) for block in blocks]
    return dict(pairs)


def test_example_prints_what_the_checkpoint_has_learnt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv(monkeypatch)
    example.main()
    assert completions(capsys.readouterr().out) == {
        "127+345=": "472",
        "reverse: hello =": "olleh",
        "count from 17:": train_tiny.count_answer(17),
        train_tiny.INTRO_PROMPT: train_tiny.INTRO_ANSWER,
        train_tiny.PRIMES_PROMPT: train_tiny.PRIMES_ANSWER,
    }


@pytest.mark.parametrize("own", [False, True])
def test_example_applies_the_chat_template(
    own: bool, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat model that is given bare text rambles; special tokens must be single ids."""
    seen: list[Any] = []
    chat = LLM.chat

    def recording(llm: LLM, *args: Any) -> Any:
        seen.extend(chat(llm, *args))
        return seen

    monkeypatch.setattr(LLM, "chat", recording)
    own_prompts = ["127+345=", "reverse: paged ="] if own else []
    argv(monkeypatch, "--model", tiny, *own_prompts)
    example.main()
    prompts = own_prompts or [train_tiny.INTRO_PROMPT, train_tiny.PRIMES_PROMPT]
    answers = ["472", "degap"] if own else [train_tiny.INTRO_ANSWER, train_tiny.PRIMES_ANSWER]
    for output, prompt in zip(seen, prompts, strict=True):
        turns = ["user", f"{prompt}", "assistant"]
        assert output.prompt == "<|im_start|>{}\n{}<|im_end|>\n<|im_start|>{}\n".format(*turns)
        start, end = train_tiny.IM_START_ID, train_tiny.IM_END_ID
        assert output.prompt_token_ids == [
            *(start, *b"user\n", *prompt.encode(), end, *b"\n"),
            *(start, *b"assistant\n"),
        ]
    found = completions(capsys.readouterr().out)
    assert found == dict(zip(prompts, answers, strict=True))


def test_example_without_a_tokenizer_says_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in AttributeError: 'NoneType' object has no attribute 'chat_template'."""
    argv(monkeypatch, "--model", str(checkpoint))
    with pytest.raises(ValueError, match="no tokenizer: pass token ids"):
        example.main()


# -- train_text.py --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_of_text_is_what_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has begun to learn, of text that is not held out; the engine finds the same loss."""
    sizes = "--steps 12 --batch 1 --hidden-size 128 --layers 1 --lr 0.3 --vocab-size 400"
    text = ("--roots", str(ROOT / "nanovllm"), "--megabytes", "0.4", "--held-out", "9000")
    argv(monkeypatch, "--device", "cpu", "--out", str(tmp_path), *text, *sizes.split())
    train_text.main()
    loss = float(capsys.readouterr().out.split("as saved: {'held-out loss': ")[1].split("}")[0])
    held_out = (tmp_path / "held-out.txt").read_text()
    held, others = train_text.split(train_text.read_texts([ROOT / "nanovllm"], 400_000), 9000)
    assert "".join(held) == held_out and not {*held} & {*others}
    with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        prompts = accuracy.pieces(llm, held_out, train_text.LENGTH - 1)
        assert llm.get_tokenizer().decode([i for ids in prompts for i in ids]) == held_out
        found = -np.mean(accuracy.measure(llm, prompts).logprobs)
    assert found == pytest.approx(loss, abs=0.1) and max(found, loss) < math.log(400) - 0.3
