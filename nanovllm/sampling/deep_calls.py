"""`call_deep`: a call with a stack for deep recursion in a library."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_size_lock = threading.Lock()  # the size of a new thread's stack is the process's


def call_deep(function: Callable[[], T], stack: int) -> T:
    """Call a function in a thread with a stack of so many bytes, and wait for it. A page of them
    takes memory when it is used.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    with _size_lock:
        before = threading.stack_size(stack)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return answer.result()
