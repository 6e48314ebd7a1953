"""A property is computed once, and in a child that was forked while another thread computed one."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator

import pytest

from stoker._base.computed import cached_property

begun, may_end = threading.Event(), threading.Event()


class Slow:
    """Its value takes as long as the test wants, in other threads than the main one."""

    def __init__(self) -> None:
        self.computed = 0

    @cached_property
    def value(self) -> int:
        self.computed += 1
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert may_end.wait(30)
        return 7


@pytest.fixture
def _busy_thread() -> Iterator[None]:
    """Another thread computes the value of another instance."""
    begun.clear()
    may_end.clear()
    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    assert begun.wait(30)
    yield
    may_end.set()
    thread.join()


def test_a_value_is_computed_once() -> None:
    slow = Slow()
    assert (slow.value, slow.value, slow.computed) == (7, 7, 1)


@pytest.mark.usefixtures("_busy_thread")
def test_a_child_forked_while_another_thread_computes_computes_for_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        child = os.fork()
    if not child:
        signal.alarm(10)  # ends a child that waits for a lock
        os._exit(Slow().value != 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
