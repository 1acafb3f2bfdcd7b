"""Triton's interpreter in the tests of kernels: several times as fast, FP8, ranks that poll."""

import dataclasses
import functools
import inspect
import os
import threading
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter


def make_faster() -> None:
    """Things that the interpreter does at each operation, and that change nothing. Done where that
    was seen: Triton 3.3 to 3.9.
    """
    if tuple(map(int, triton.__version__.split(".")[:2])) > (3, 9):
        return
    _patch_language_once()
    _remember_types()
    # Integer sums and products are repeated in 64 bits; whether they agree is asked in `debug`.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # A table of all dtypes is built to look one up.
    numpy_dtype, known = interpreter._get_np_dtype, {}

    def numpy_dtype_once(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = numpy_dtype(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = numpy_dtype_once


def _patch_language_once() -> None:
    """The interpreter puts its own functions into `triton.language` at a launch, and again at each
    call of one function of a kernel by another, although only the first that sees `tl` and the
    first that sees `tl.core` find anything to replace.
    """
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = {interpreter.tl, interpreter.tl.core}
    this_thread = threading.local()  # its `patched`, within a launch

    @functools.cache
    def seen_by(fn: Any) -> set[Any]:
        return {value for value in fn.__globals__.values() if inspect.ismodule(value)} & modules

    def patch_lang_once(fn: Any) -> Any:
        patched = getattr(this_thread, "patched", None)
        if patched is None:
            return patch_lang(fn)
        seen = seen_by(fn)
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


def _remember_types() -> None:
    """Each result has a type, and each type is checked and described anew; so is each shape, to
    find that equal ones need no broadcast.
    """
    block_type, tensor = interpreter.tl.core.block_type, interpreter.tl.core.tensor
    make_type, make_tensor = block_type.__init__, tensor.__init__
    broadcast = interpreter.TritonSemantic.broadcast_impl_value
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *shape
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self)
        self.__dict__ = types[key]

    def make_tensor_of_known(self: Any, handle: Any, type: Any) -> None:
        facts = vars(type).get("of_tensors")
        if facts is None:
            make_tensor(self, handle, type)
            self.shape = shapes.setdefault(tuple(size.value for size in self.shape), self.shape)
            type.of_tensors = {k: v for k, v in vars(self).items() if k != "handle"}
        else:
            self.__dict__ = {**facts, "handle": handle}

    def broadcast_to_another_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    block_type.__init__, tensor.__init__ = make_type_once, make_tensor_of_known
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_to_another_shape


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
    Who polls lets others run, where there are more ranks than cores.
    """
    load = interpreter.InterpreterBuilder.create_masked_load

    def load_until_equal(self: Any, *args: Any) -> Any:
        *_, is_volatile = args
        given = load(self, *args)
        while is_volatile:
            os.sched_yield()
            last, given = given, load(self, *args)
            if np.array_equal(last.data, given.data):
                break
        return given

    interpreter.InterpreterBuilder.create_masked_load = load_until_equal
