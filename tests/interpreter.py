"""Triton's interpreter in the tests of kernels: several times as fast, FP8, ranks that poll."""

import dataclasses
import functools
import inspect
import os
import threading
from collections.abc import Callable
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
    _call_at_once()
    _remember_types()
    _remember_operands()
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


def _call_at_once() -> None:
    """At each launch all functions of the language are looked up and replaced by others, which copy
    the names of their arguments to add the interpreter's semantics, and ask whether they are there.
    """
    if not hasattr(interpreter, "_LangPatchScope"):  # Triton 3.4
        return
    language = interpreter.tl

    def direct(member: Any) -> Callable[..., Any]:
        function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return called

    @functools.cache
    def functions(owner: Any) -> list[tuple[str, Callable[..., Any]]]:
        members = inspect.getmembers(owner, language.core.is_builtin)
        return [(name, direct(member)) for name, member in members]

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, function in functions(owner):
            scope.set_attr(owner, name, function)

    for owner in (language, language.core, language.math, language.tensor):
        functions(owner)  # before any is replaced
    interpreter._patch_builtin = patch_builtin


def _remember_types() -> None:
    """Each result has a type, and each type is checked and described anew; so is each shape, to
    find that equal ones need no broadcast.
    """
    block_type, tensor = interpreter.tl.core.block_type, interpreter.tl.core.tensor
    make_type, make_tensor = block_type.__init__, tensor.__init__
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

    core, unwrap = interpreter.tl.core, interpreter.tl.core._unwrap_if_constexpr
    plain = {tensor, block_type, core.dtype, core.pointer_type, int, float, bool, type(None)}
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    block_type.__init__, tensor.__init__ = make_type_once, make_tensor_of_known


def _remember_operands() -> None:
    """What becomes of the operands of an operator depends on their types, and is found out at each
    operation: what they are cast to, the shape that they are broadcast to, numbers as blocks.
    """
    semantic, tensor = interpreter.TritonSemantic, interpreter.tl.core.tensor
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    steps: dict[Any, list[Any]] = {}
    shapes: dict[Any, list[Any]] = {}

    def wider(value: Any, to: Any) -> Any:
        if to is None:
            return value
        handle, (block_type, shape) = value.handle, to
        if value.type.is_block():
            data = np.broadcast_to(handle.data, shape)
        else:
            data = np.full(shape, handle.data, interpreter._get_np_dtype(handle.dtype))
        return tensor(interpreter.TensorHandle(data, handle.dtype), block_type)

    def how_wide(old: Any, new: Any) -> Any:
        return None if new is old else (new.type, new.handle.data.shape)

    def broadcast_as_before(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key not in shapes:
            left, right = broadcast(self, lhs, rhs)
            shapes[key] = [how_wide(lhs, left), how_wide(rhs, right)]
            return left, right
        left, right = shapes[key]
        return wider(lhs, left), wider(rhs, right)

    def described(operand: Any) -> Any:
        if isinstance(operand, tensor):
            return operand.type.name
        return type(operand), operand, str(operand)[:1]  # 0.0 and -0.0 are equal

    def check_as_before(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        key = described(lhs), described(rhs), flags, *named.items()
        if key not in steps:
            operands = check(self, lhs, rhs, *flags, **named)
            steps[key] = [step(old, new) for old, new in zip((lhs, rhs), operands, strict=True)]
            return operands
        left, right = steps[key]
        return left(self, lhs), right(self, rhs)

    def step(old: Any, new: Any) -> Callable[[Any, Any], Any]:
        if not isinstance(old, tensor):
            return lambda self, value: new
        width = None if new.shape is old.shape else how_wide(old, new)
        dtype = new.dtype
        if dtype == old.dtype:
            return lambda self, value: wider(value, width)
        return lambda self, value: wider(self.cast(value, dtype), width)

    semantic.binary_op_type_checking_impl = check_as_before
    semantic.broadcast_impl_value = broadcast_as_before


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
