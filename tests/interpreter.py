"""Triton's interpreter in the tests of kernels: twice as fast, FP8, and ranks that poll."""

import dataclasses
import inspect
import threading
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter


def make_faster() -> None:
    """Three things that the interpreter does at each operation change nothing:

    - It puts its own functions into `triton.language` at a launch, and again at each call of one
      function of a kernel by another, although only the first that sees `tl` and the first that
      sees `tl.core` find anything to replace.
    - It repeats integer sums and products in 64 bits; whether they agree it asks only in `debug`.
    - It builds a table of all dtypes to look one up.

    Done where it was seen: Triton 3.3 to 3.9.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) > (3, 9):
        return
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = {interpreter.tl, interpreter.tl.core}
    this_thread = threading.local()  # its `patched`, within a launch

    def patch_lang_once(fn: Any) -> Any:
        patched = getattr(this_thread, "patched", None)
        if patched is None:
            return patch_lang(fn)
        seen = {value for value in fn.__globals__.values() if inspect.ismodule(value)} & modules
        if seen and seen <= patched:
            return None
        patched |= seen
        return patch_lang(fn)

    def launch_and_patch(self: Any, *args: Any, **kwargs: Any) -> None:
        this_thread.patched = set()
        try:
            launch(self, *args, **kwargs)
        finally:
            this_thread.patched = None

    interpreter._patch_lang = patch_lang_once
    interpreter.GridExecutor.__call__ = launch_and_patch

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    numpy_dtype, known = interpreter._get_np_dtype, {}

    def numpy_dtype_once(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = numpy_dtype(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = numpy_dtype_once


def round_to_fp8() -> None:
    """Convert to and from FP8 (e4m3) as GPUs and PyTorch do: Triton 3.9 forgets the carry where
    rounding up makes a power of two.
    """
    convert, fp8 = interpreter._convert_float, interpreter.tl.float8e4nv

    def convert_float(x: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if target == fp8 and source in (interpreter.tl.float32, interpreter.tl.float16):
            return torch.from_numpy(np.array(x)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(x, source, target, rounding_mode)

    interpreter._convert_float = convert_float


def poll_whole_numbers() -> None:
    """Have volatile loads return what another process wrote, or what was there before.

    glibc copies two bytes by copying one of them again, so a load may see one byte of the old
    number and one of the new. Numbers that are polled change once: two equal loads saw the same.
    """
    load = interpreter.InterpreterBuilder.create_masked_load

    def load_until_equal(self: Any, *args: Any) -> Any:
        *_, is_volatile = args
        given = load(self, *args)
        while is_volatile:
            last, given = given, load(self, *args)
            if np.array_equal(last.data, given.data):
                break
        return given

    interpreter.InterpreterBuilder.create_masked_load = load_until_equal
