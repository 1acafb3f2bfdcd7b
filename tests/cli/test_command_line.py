"""The entry, the flags made of the classes' fields, and `nanovllm info`."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import SMALL, make_checkpoint
from nanovllm import LLM, SamplingParams, StructuredOutputsParams, __version__
from nanovllm.cli import info, options, stand_in
from nanovllm.cli.compile import check_writable
from nanovllm.cli.main import COMMANDS, main
from nanovllm.compiling.server import Job
from nanovllm.config import DEFAULTS


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


# -- the entry ------------------------------------------------------------------------------------


def test_both_ways_in_lead_to_it() -> None:
    done = run(sys.executable, "-m", "nanovllm", "--version")
    assert (done.returncode, done.stdout) == (0, f"nanovllm {__version__}\n")
    script = Path(sys.executable).parent / "nanovllm"
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    done = run(str(script), "chat", "--max-tokens", "0")
    assert done.returncode == 2
    assert done.stderr == "nanovllm chat: error: `max_tokens` must be at least 1, got 0\n"


def test_help_answers_before_torch_is_imported() -> None:
    code = f"""if True:
        import sys
        from nanovllm.cli.main import main
        for command in [[], *([name] for name in {list(COMMANDS)})]:
            try:
                main([*command, "--help"])
            except SystemExit as end:
                assert end.code == 0
        heavy = ["torch", "transformers", "numpy", "triton", "pyarrow", "pandas", "ray"]
        sys.exit(str([name for name in heavy if name in sys.modules]))
    """
    done = run(sys.executable, "-c", code)
    assert done.stderr == "[]\n"
    assert done.stdout.count("usage: nanovllm") == 1 + len(COMMANDS)
    for usage in ("serve [options] [MODEL]\n", "report [options] TRACE\n", "info [options]\n"):
        assert f"usage: nanovllm {usage}" in done.stdout


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_flag_says_what_it_does(command: str) -> None:
    parser = argparse.ArgumentParser()
    COMMANDS[command].add_arguments(parser)
    assert [action.dest for action in parser._actions if not (action.help or "").strip()] == []
    assert parser.format_help()  # no text has a bare %


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chat", "--temperature", "-1"], "`temperature` must be finite and 0"),
        (["chat", "--model", "/nowhere"], "`model` must be the directory of a checkpoint"),
        (["chat", "--device", "gpu"], "`device` must be cuda, cuda:N, cpu or auto, got 'gpu'"),
        (["chat", "--top-k", "many"], "--top-k: must be an integer, got 'many'"),
        (["chat", "--top-p", "half"], "--top-p: must be a number, got 'half'"),
        (["chat", "--logit-bias", "{5: 1}"], "--logit-bias: must be JSON"),
        (["chat", "--logit-bias", '{"5": NaN}'], """'{"5": NaN}': NaN is not a JSON number"""),
        (["chat", "--logit-bias", '{"a": 1}'], "`logit_bias` must hold integer token ids"),
        (["chat", "--structured-outputs", "{}"], "`structured_outputs` must have exactly one"),
        (["chat", "--trace", "/nowhere/t.json"], "--trace: must be in a directory that exists"),
        (["chat", "--temp", "1"], "unrecognized arguments: --temp"),  # not --temperature
        (["generate", "--input", "-"], "--model must be the directory of a checkpoint or its name"),
        (["talk"], "invalid choice: 'talk'"),
        ([], "required: command"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1 and err.startswith("nanovllm")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(info, "collect", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["info"])


def test_ctrl_c_has_the_exit_code_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "collect", interrupt)
    assert main(["info"]) == 130


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    code = """if True:
        import sys
        from nanovllm.cli import info, main
        info.collect, info.describe = dict, lambda found: "more than a pipe holds" * 10_000
        sys.exit(main.main(["info"]))
    """
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=reader.stdin, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (1, b"")


# -- flags ----------------------------------------------------------------------------------------


def parse(*args: str) -> tuple[dict[str, Any], dict[str, Any]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    options.add_engine_options(parser)
    options.add_sampling_options(parser)
    found = parser.parse_args(args)
    return options.engine_options(found), options.sampling_options(found)


@pytest.mark.parametrize(
    ("args", "engine"),
    [
        ((), {}),
        (("--max-num-seqs", "7", "--seed", "3"), {"max_num_seqs": 7}),
        (("--engine-seed", "3"), {"seed": 3}),
        (("--gpu-memory-utilization", "0.5"), {"gpu_memory_utilization": 0.5}),
        (("--enforce-eager", "--no-mixed-steps"), {"enforce_eager": True, "mixed_steps": False}),
        (("--overlap",), {"overlap": True}),
        (("--no-overlap",), {"overlap": False}),
        (("--max-model-len", "none"), {"max_model_len": None}),
        (("--adapter", "a"), {"adapter": ["a"]}),
        (("--adapter", "a", "--adapter", "b/c"), {"adapter": ["a", "b/c"]}),
        (("--allowed-media-domains", "a.org"), {"allowed_media_domains": ["a.org"]}),
        (("--trace",), {"trace": True}),
        (("--trace", "run.json"), {"trace": "run.json"}),
        (("--quantization", "None", "--dtype", "half"), {"quantization": None, "dtype": "half"}),
    ],
)
def test_engine_flags(args: tuple[str, ...], engine: dict[str, Any]) -> None:
    assert parse(*args)[0] == engine


@pytest.mark.parametrize(
    ("args", "sampling"),
    [
        (("--engine-seed", "3"), {}),
        (("--seed", "3"), {"seed": 3}),
        (("--max-tokens", "none", "--temperature", "0"), {"max_tokens": None, "temperature": 0.0}),
        (("--stop", "###"), {"stop": ["###"]}),
        (("--stop", '["a", "[b"]'), {"stop": ["a", "[b"]}),
        (("--bad-words", "no"), {"bad_words": ["no"]}),
        (("--stop-token-ids", "[1, 2]"), {"stop_token_ids": [1, 2]}),
        (("--logit-bias", '{"57": 2.5}'), {"logit_bias": {57: 2.5}}),
        (
            ("--structured-outputs", '{"choice": ["a", "b"]}'),
            {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])},
        ),
        (
            ("--no-detokenize", "--ignore-eos", "--n", "2"),
            {"detokenize": False, "ignore_eos": True, "n": 2},
        ),
    ],
)
def test_sampling_flags(args: tuple[str, ...], sampling: dict[str, Any]) -> None:
    assert parse(*args)[1] == sampling
    SamplingParams(**sampling)


def test_flags_are_the_fields_and_say_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    options.add_engine_options(parser)
    options.add_sampling_options(parser)
    engine = {"engine." + name: value for name, value in DEFAULTS.items()}
    del engine["engine.enable_sleep_mode"]  # no command sleeps
    fields = {"sampling." + f.name: f.default for f in dataclasses.fields(SamplingParams)}
    actions = {action.dest: action for action in parser._actions[1:]}
    assert set(actions) == {*engine, *fields}
    for name, default in {**engine, **fields}.items():
        is_word = default is None or isinstance(default, bool)
        text = str(default).lower() if is_word else str(default)
        assert (actions[name].help or "").endswith(f" (default: {text})"), name
        assert len(actions[name].help or "") > len(f" (default: {text})") + 5, name
    assert "model" in (actions["engine.max_model_len"].help or "")


def test_a_new_field_is_a_flag_by_itself() -> None:
    """With its name, type, default, and the text of the class's docstring."""

    @dataclasses.dataclass
    class Options:
        """Of an engine.

        Attributes:
            num_things: how many, of which
                50% are here.
            other: another.

        Raises:
            ValueError: never.
        """

        num_things: int | None = 5
        other: bool = False

    parser = argparse.ArgumentParser()
    hints = {"num_things": int | None, "other": bool}
    options._add(parser, options.ENGINE, Options, hints)
    assert "how many, of which 50% are here. (default: 5)" in " ".join(parser.format_help().split())
    args = parser.parse_args(["--num-things", "7", "--other"])
    assert options.engine_options(args) == {"num_things": 7, "other": True}


# -- info -----------------------------------------------------------------------------------------


def test_info_knows_what_runs(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    """Backends that it refuses are refused by an engine, for the same reason; others run."""
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # A wheel's own name has no "+cu130".
    assert found["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["nanovllm"] == __version__
    [cpu] = found["devices"]
    assert cpu["device"] == "cpu" and cpu["cores"] >= 1
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]
    assert set(cpu["attention"]) == {"triton", "flash_attn", "torch"} and found["no_cuda"]
    for name, refusal in cpu["attention"].items():
        if name == "torch":
            assert refusal is None
            LLM(tiny, device="cpu", attention_backend=name, num_kvcache_blocks=2).exit()
        elif refusal is not None:  # the interpreter runs Triton
            with pytest.raises(ValueError) as error:
                LLM(tiny, device="cpu", attention_backend=name)
            assert f"{name}: {refusal}" in str(error.value)


def test_info_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    set_capability: Callable[[tuple[int, int]], None],
) -> None:
    """A GPU that is too old for our kernels."""
    set_capability((7, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * 2**30, 16 * 2**30))
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "\ncuda:0: Tesla T4, compute capability 7.5, 16.0 GiB, 12.0 free\n" in out
    refusal = "needs a GPU of compute capability 8.0 or higher, got 7.5"
    assert f"  attention triton: no: {refusal}\n" in out
    assert out.count("  attention torch: yes\n") == 2 and "no CUDA device" not in out


def test_info_tells_what_an_extra_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = ["torch>=2", 'a>=2; extra == "x"', 'b[c]; extra == "x"', 'b; extra == "y"']
    versions = {"torch": "2.7", "a": "1.9", "b": "1"}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert '  x: pip install "a>=2" "b[c]"\n  y: installed\n' in out


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3_5_text", {"num_hidden_layers": 4, "head_dim": 32, "tie_word_embeddings": True}),
        ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    ],
)
def test_info_of_a_model(
    family: str, shape: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes are those of the checkpoint's matrices, and of what an engine allocates."""
    path = make_checkpoint(tmp_path / "model", family, **shape)
    assert main(["info", "--model", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["info", "--model", str(path)]) == 0
    text = capsys.readouterr().out
    assert ("states: " in text) == (family == "qwen3_5_text") and f"{found['dtype']}, up" in text
    tensors = load_file(path / "model.safetensors").items()
    matrices = [x for name, x in tensors if x.dim() == 2 and "conv1d" not in name]
    assert found["parameters"] == sum(x.numel() for x in matrices)
    assert found["weights_bytes"] == 4 * found["parameters"] and found["dtype"] == "float32"
    with LLM(path, **SMALL) as llm:
        pool = llm.model_runner.built.pool
        assert found["kv_bytes_of_a_token"] * SMALL["kvcache_block_size"] == pool.block_bytes
        assert found["state_bytes_of_a_sequence"] == pool.sequence_bytes
    (path / "config.json").write_text('{"architectures": ["NemotronHForCausalLM"]}')
    assert main(["info", "--model", str(path)]) == 2
    assert "NemotronHForCausalLM" in capsys.readouterr().err


def compile_into(cache: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """`nanovllm compile` for an H100, in a process of its own."""
    pytest.importorskip("triton")
    own = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "nanovllm", "compile", "--capability", "9", *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**own, "TRITON_CACHE_DIR": str(cache)},
    )


@pytest.mark.slow
def test_a_second_compile_finds_all_kernels(tiny: str, tmp_path: Path) -> None:
    """Kernels of both ranks, which differ. The cache is in a directory to be made."""
    options = "--model", tiny, "--max-num-seqs", "2", "--max-num-batched-tokens", "64"
    found = []
    for size in ("2", "2", "1"):
        ended = compile_into(tmp_path / "new", *options, "--tensor-parallel-size", size)
        assert ended.returncode == 0, ended.stderr
        line = ended.stdout.splitlines()[0]
        numbers = re.fullmatch(
            r"(\d+) of (\d+) kernels are compiled for compute capability 9.0, "
            r"(\d+) of them now\.",
            line,
        )
        assert numbers is not None, line
        found.append([int(number) for number in numbers.groups()])
    both, both_again, one = found
    assert both[0] == both[1] == both[2] > 20 and both_again == [*both[:2], 0]
    assert one[0] == one[1] < both[0]


def test_compile_refuses_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "to" / "be" / "made"))
    (tmp_path / "file").touch()
    said = r"cannot be written \(.+\): set TRITON_CACHE_DIR to"
    for cache in ("", str(tmp_path / "file"), str(tmp_path / "file" / "cache"), "/proc/cache"):
        with pytest.raises(ValueError, match=said):
            check_writable(cache)


def test_compile_names_what_failed(
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On any rank, once for each reason; and the exit code says so."""
    pytest.importorskip("triton")
    jobs = [Job("module", name, rank) for name in ("norm", "draw") for rank in ("0", "1")]
    failed = dict.fromkeys(jobs[1:], "no memory")
    ranks = [
        SimpleNamespace(rehearsed=dict.fromkeys(own), failed=failed, num_compiled=len(own) - 1)
        for own in (jobs[:3], jobs[2:])
    ]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a knob that is set stays set
    monkeypatch.setattr(stand_in, "put_in", lambda card: None)
    monkeypatch.setattr(stand_in, "compile_kernels", lambda *args: ranks)
    assert main(["compile", "--model", tiny, "--capability", "9.0"]) == 1
    assert "1 of 4 kernels are compiled" in capsys.readouterr().out
    assert "3 kernels (draw, norm): no memory" in caplog.text


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--device", "cpu", "`--device` must be cuda or auto"),
        ("--attention-backend", "torch", "cannot be compiled ahead with `attention_backend` torch"),
    ],
)
def test_compile_says_what_it_cannot_do(
    flag: str, value: str, said: str, tiny: str, tmp_path: Path
) -> None:
    """These were tracebacks: of an assertion, and of a tensor without content."""
    ended = compile_into(tmp_path, "--model", tiny, flag, value)
    line = ended.stderr.strip().rpartition("\n")[2]
    assert ended.returncode == 2, ended.stderr
    assert line.startswith("nanovllm compile: error: ") and said in line
    assert value == "cpu" or line.endswith("(as chosen)"), "the reason for the backend"
