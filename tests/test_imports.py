"""The host logic imports nothing heavy, and neither does the package itself."""

import subprocess
import sys

import pytest

HOST_MODULES = ("sequence", "block_manager", "scheduler", "admission", "batch", "memory", "inputs")


@pytest.mark.parametrize(
    "modules", ["nanovllm", ", ".join(f"nanovllm.engine.{name}" for name in HOST_MODULES)]
)
def test_import_is_light(modules):
    heavy = ("torch", "triton", "transformers", "flash_attn")
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
