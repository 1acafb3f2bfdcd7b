"""The lock of an engine: first come, first served; Ctrl-C and signals anywhere lose no turn."""

import contextlib
import signal
import sys
import threading

import pytest

from faults import DEADLINE, wait_until, within_deadline
from nanovllm.threads import fair_lock
from nanovllm.threads.fair_lock import FairLock


@pytest.fixture(autouse=True)
def deadline():
    """A hang of the main thread fails the test."""

    def fail(*_):
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(DEADLINE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Queue:
    """A lock that a thread holds until `release`, and threads behind it that note their turns."""

    def __init__(self):
        self.lock, self.served, self.threads = FairLock(), [], []
        self.held, self.leave = threading.Event(), threading.Event()
        self.start(self._hold)
        assert self.held.wait(60)

    def start(self, target, *args):
        self.threads.append(threading.Thread(target=target, args=args, daemon=True))
        self.threads[-1].start()

    def _hold(self):
        with self.lock:
            self.held.set()
            self.leave.wait()

    def join(self, name, times=1):
        """Returns when a thread is in the queue. Once served, it comes again at once, so often."""
        last = self.lock._last
        self.start(self.serve, name, times)
        wait_until(lambda: self.lock._last is not last)

    def serve(self, name, times=1):
        for _ in range(times):
            with self.lock:
                self.served.append(name)

    def release(self):
        """Returns the names of those behind, in the order in which they had the lock."""
        self.leave.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "hangs"
        return self.served


def test_first_come_first_served():
    queue, names = Queue(), list(range(20))
    for name in names:
        queue.join(name)
    assert queue.release() == names


def test_who_comes_again_goes_behind_those_who_wait():
    """An `exit` waited for 29 s while threads took the engine again and again."""
    queue = Queue()
    for name in "abc":
        queue.join(name, times=50)
    queue.join("exit")
    assert queue.release()[:4] == ["a", "b", "c", "exit"]


def test_it_excludes_and_is_reentrant():
    lock, inside, most = FairLock(), [], 0

    def work():
        nonlocal most
        for _ in range(300):
            with lock:
                with lock, lock:
                    inside.append(1)
                    most = max(most, len(inside))
                inside.pop()

    def run():
        threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        within_deadline(run)
    finally:
        sys.setswitchinterval(interval)
    assert most == 1 and not inside


@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_ctrl_c_gives_a_place_up(place):
    """The others keep theirs: those behind wait for those ahead."""
    queue = Queue()

    def others_join_and_it_comes(last):
        wait_until(lambda: queue.lock._last is not last)
        for name in range(place, 4):
            queue.join(name)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    for name in range(place):
        queue.join(name)
    helper = threading.Thread(target=others_join_and_it_comes, args=(queue.lock._last,))
    helper.start()
    with pytest.raises(KeyboardInterrupt), queue.lock:
        pytest.fail("it was not free")
    helper.join()
    assert queue.release() == [0, 1, 2, 3]
    queue.start(queue.serve, "next")
    assert queue.release()[4:] == ["next"]


@contextlib.contextmanager
def interrupt_at_call(k):
    """KeyboardInterrupt at the k-th place of the lock's code where Python raises it: the start of
    a function, or after a call.
    """
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        if event in ("call", "c_return") and frame.f_code.co_filename == fair_lock.__file__:
            count += 1
            if count == k:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def is_interrupted(state, k):
    """Take the lock and release it, interrupted at the k-th place. It must be free for others."""
    queue = Queue()
    lock, last, ended = queue.lock, queue.lock._last, threading.Event()

    def release():
        wait_until(lambda: lock._last is not last or ended.is_set())
        queue.leave.set()

    helper = threading.Thread(target=release)
    if state != "held by another":
        queue.release()
        ended.set()
    helper.start()
    with lock if state == "held by this thread" else contextlib.nullcontext():
        try:
            with interrupt_at_call(k), lock:
                pass
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
    ended.set()
    helper.join()
    queue.start(queue.serve, "next")
    assert queue.release() == ["next"]
    return interrupted


@pytest.mark.parametrize(
    ("state", "fewest"), [("free", 5), ("held by this thread", 3), ("held by another", 12)]
)
def test_ctrl_c_at_any_call(state, fewest):
    """The work done by then is undone."""
    k = 1
    while is_interrupted(state, k):
        k += 1
    assert k > fewest


def test_a_signal_handler_does_not_wait_for_what_it_has_interrupted():
    queue, order, handled = Queue(), [], threading.Event()

    def handler(*_):
        handled.set()
        with queue.lock:
            order.append("handler")

    def helper(last):
        wait_until(lambda: queue.lock._last is not last)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert handled.wait(60)
        queue.leave.set()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread = threading.Thread(target=helper, args=(queue.lock._last,))
        thread.start()
        with queue.lock:
            order.append("interrupted")
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert order == ["handler", "interrupted"]
    assert queue.release() == []
