"""The host logic imports nothing heavy, the package little, and the engine only what it uses."""

import shutil
import subprocess
import sys

import pytest

from checkpoints import SMALL, TINY

HOST_MODULES = {
    "adapters": "directory config parameters matching",
    "images": "image positions processor reading urls prompts picture preparation",
    "engine": "sequence block_manager scheduler plan step_layout engine_core",
    "scheduling": "admission encoder_cache prefixes stopping",
    "sizing": "memory model_size",
    "windows": "pages sliding_blocks",
    "requests": "inputs intake request detokenizer",
    "sampling": "request_controls control_table structured_output controls",
    "ranks": "channel workers",
    "tracing": "metrics timeline trace_events trace_file",
}
USER_MODULES = "requests.beam_search requests.chat outputs sampling_params"
NEVER = ["transformers", "triton", "flash_attn", "scipy", "matplotlib", "pandas", "IPython"]
NEVER += ["llguidance", "pyarrow", "PIL", "starlette", "uvicorn"]


def imported(code: str, modules: list[str]) -> list[str]:
    """The modules that a fresh interpreter has imported after `code`."""
    code += f"\nimport sys; print([name for name in {modules} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return eval(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "modules",
    [
        "nanovllm",
        ", ".join(f"nanovllm.{name}" for name in USER_MODULES.split()),
        "nanovllm.batch, nanovllm.cli.generate",
        "nanovllm.report.reading, nanovllm.report.summary, nanovllm.report.findings",
        ", ".join(
            f"nanovllm.{room}.{name}"
            for room, names in HOST_MODULES.items()
            for name in names.split()
        ),
    ],
)
def test_import_is_light(modules):
    assert imported(f"import {modules}", ["torch", *NEVER]) == []


def test_error_inside_a_lazy_import_is_shown(tmp_path):
    """Python turns an AttributeError there into "cannot import name 'LLM'", without its cause."""
    (tmp_path / "torch.py").write_text("import math; math.no_such_function")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from nanovllm import LLM"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    cause, _, error = done.stderr.strip().partition("The above exception was the direct cause")
    assert str(tmp_path / "torch.py") in cause, "where it happened"
    assert error.splitlines()[-1] == (
        "ImportError: nanovllm.llm cannot be imported: AttributeError: "
        "module 'math' has no attribute 'no_such_function'"
    )


def test_an_engine_without_tokenizer_needs_no_transformers(tmp_path):
    """transformers takes seconds to import. Kernels and flash-attn are not for a CPU either, and
    llguidance, which a plain install lacks, is for structured outputs alone.
    """
    shutil.copy(TINY / "config.json", tmp_path)
    code = f"""if True:
        from nanovllm import LLM, SamplingParams
        params = SamplingParams(top_p=0.9, min_tokens=2, allowed_token_ids=[1, 2, 256], logprobs=1)
        with LLM({str(tmp_path)!r}, load_format="dummy", **{SMALL}) as llm:
            llm.generate([1, 2, 3], params, use_tqdm=False)
    """
    assert imported(code, ["torch", *NEVER]) == ["torch"]
