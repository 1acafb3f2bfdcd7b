"""The benchmark of the server: what it measures is what it asked for."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from http_server import OPTIONS

from benchmarks import serve
from nanovllm import TINY
from nanovllm.cli import bench

SHAPE = "qwen3-0.6b"  # stands for a tiny one here


def run(monkeypatch, *args):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    small = ["--prompt-tokens", "5", "--max-tokens", "6", "--device", "cpu", *options]
    monkeypatch.setitem(bench.SHAPES, SHAPE, json.loads((Path(TINY) / "config.json").read_text()))
    monkeypatch.setattr(sys, "argv", ["serve.py", "--dummy", SHAPE, *small, *args])
    serve.main()


def test_clients_are_measured_beside_generate(monkeypatch, capsys, tmp_path):
    file = tmp_path / "results.jsonl"
    args = ("--clients", "1", "3", "--idle", "2", "--repeat", "2", "--save", str(file))
    run(monkeypatch, *args)
    record = json.loads(file.read_text())
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["benchmark"], record["max_tokens"]) == ("serve", 6)
    results = record["results"]
    assert results.keys() == {"clients-1", "clients-3", "first-token", "idle"}
    for name in ("clients-1", "clients-3", "idle"):
        low, high = results[name]["runs"]
        assert 0 < low <= results[name]["median"] <= high
        assert results[name]["share"] > 0
    assert results["idle"]["other"] == results["clients-3"]["median"]
    assert len(results["first-token"]["runs"]) == serve.NUM_FIRST
    assert results["first-token"]["median"] > 0


def test_shares_are_medians_over_the_turns(capsys):
    """The machine may become slower from turn to turn, for both."""
    found = serve.compared("clients", [90.0, 70.0, 10.0], [100.0, 100.0, 10.0], "generate")
    assert (found["share"], found["median"], found["other"]) == (0.9, 70.0, 100.0)
    assert "70 tok/s (10–90), 0.900 of generate (100)" in capsys.readouterr().out


def test_tokens_that_are_missing_are_no_result(monkeypatch):
    """A server that ends its streams early is not faster."""
    from nanovllm.openai import asks

    read = asks.read_sampling

    def shorter(*args):
        params = read(*args)
        return replace(params, max_tokens=min(params.max_tokens, 3))

    monkeypatch.setattr(asks, "read_sampling", shorter)
    with pytest.raises(RuntimeError, match=r"\[3\] tokens instead of 6"):
        run(monkeypatch, "--clients", "1", "--idle", "0", "--repeat", "1")


def test_the_tokenizer_of_models_without_weights_makes_words(tmp_path):
    from transformers import AutoTokenizer

    serve.add_tokenizer(str(tmp_path), 300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode([0, 7, 298]) == " w0 w7 w298"
    assert tokenizer.eos_token_id == 299 == len(tokenizer) - 1
