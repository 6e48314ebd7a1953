"""The SIGTERM hook, in this process and in real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from stoker.errors import ConfigError
from stoker_torch import Preemption, save_on_sigterm

NUMBER = signal.SIGUSR1


class Counter:
    """A loader of numbers whose state is the last one it yielded."""

    def __init__(self) -> None:
        self.yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def __iter__(self) -> Iterator[int]:
        while True:
            self.yielded += 1
            yield self.yielded


@pytest.fixture(autouse=True)
def previous() -> Iterator[list[int]]:
    """Install a handler that records what reaches it, and check that it is in place again at the end."""
    reached: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        reached.append(number)

    before = signal.signal(NUMBER, record)
    yield reached
    assert signal.signal(NUMBER, before) is record


def hook(loader: Counter, saved: list[dict[str, int]], **options: float) -> Preemption:
    return save_on_sigterm(loader, saved.append, signals=[NUMBER], **options)


def test_the_state_of_the_last_batch_is_handed_over_once(previous: list[int]) -> None:
    saved: list[dict[str, int]] = []
    loader = Counter()
    with hook(loader, saved) as preemption:
        for number in loader:
            assert preemption.is_requested == (number > 3)
            if number == 3:
                assert preemption.remaining_seconds == 10
                signal.raise_signal(NUMBER)
                assert preemption.remaining_seconds < 10
            if number == 5:
                signal.raise_signal(NUMBER)
                break
    assert saved == [{"yielded": 3}]
    assert previous == [NUMBER, NUMBER]


def test_without_a_signal_nothing_happens(previous: list[int]) -> None:
    saved: list[dict[str, int]] = []
    with hook(Counter(), saved) as preemption:
        preemption.checkpoint()
    preemption.close()
    signal.raise_signal(NUMBER)
    assert saved == []
    assert previous == [NUMBER]


def test_with_time_to_wait_the_state_is_handed_over_at_the_next_checkpoint(previous: list[int]) -> None:
    saved: list[dict[str, int]] = []
    loader = Counter()
    with hook(loader, saved, grace_seconds=1000, wait_seconds=900) as preemption:
        for number in loader:
            if number == 2:
                signal.raise_signal(NUMBER)
                assert saved == []
                assert previous == []
            preemption.checkpoint()
            if number == 4:
                break
    assert saved == [{"yielded": 2}]
    assert previous == [NUMBER]


def test_a_second_signal_ends_the_wait(previous: list[int]) -> None:
    saved: list[dict[str, int]] = []
    with hook(Counter(), saved, grace_seconds=1000, wait_seconds=900) as preemption:
        signal.raise_signal(NUMBER)
        signal.raise_signal(NUMBER)
        assert saved == [{"yielded": 0}]
        preemption.checkpoint()
    assert len(saved) == 1
    assert previous == [NUMBER]


def test_without_a_checkpoint_the_wait_ends_by_itself(previous: list[int]) -> None:
    saved: list[dict[str, int]] = []
    arrived = threading.Event()

    def save(state: dict[str, int]) -> None:
        assert threading.current_thread() is threading.main_thread()
        saved.append(state)
        arrived.set()

    with save_on_sigterm(Counter(), save, signals=[NUMBER], wait_seconds=0.01):
        signal.raise_signal(NUMBER)
        assert arrived.wait(60)
    assert saved == [{"yielded": 0}]
    assert previous == [NUMBER]


def test_a_signal_during_the_callback_does_not_disturb_it(previous: list[int]) -> None:
    calls = []

    def save(state: dict[str, int]) -> None:
        calls.append("begin")
        signal.raise_signal(NUMBER)
        calls.append("end")

    with save_on_sigterm(Counter(), save, signals=[NUMBER]):
        signal.raise_signal(NUMBER)
    assert calls == ["begin", "end"]
    assert previous == [NUMBER]


def test_an_exception_of_the_callback_goes_up_through_the_loop_and_not_to_the_previous_handler(
    previous: list[int],
) -> None:
    def save(state: dict[str, int]) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"), save_on_sigterm(Counter(), save, signals=[NUMBER]):
        signal.raise_signal(NUMBER)
    assert previous == []


def test_hooks_chain_and_may_be_closed_in_any_order(previous: list[int]) -> None:
    first: list[dict[str, int]] = []
    second: list[dict[str, int]] = []
    below = hook(Counter(), first)
    above = hook(Counter(), second)
    below.close()
    signal.raise_signal(NUMBER)
    assert (len(first), len(second), previous) == (0, 1, [NUMBER])
    above.close()
    # The hook below stays installed as what the one above put back; closed, it only passes on.
    signal.raise_signal(NUMBER)
    assert (len(first), len(second), previous) == (0, 1, [NUMBER, NUMBER])
    below.close()


def test_a_handler_installed_since_is_left_alone() -> None:
    before = signal.getsignal(NUMBER)
    preemption = hook(Counter(), [])
    signal.signal(NUMBER, signal.SIG_IGN)
    preemption.close()
    assert signal.getsignal(NUMBER) == signal.SIG_IGN
    signal.signal(NUMBER, before)


def test_an_ignored_signal_stays_harmless() -> None:
    before = signal.signal(NUMBER, signal.SIG_IGN)
    saved: list[dict[str, int]] = []
    with hook(Counter(), saved):
        signal.raise_signal(NUMBER)
    assert saved == [{"yielded": 0}]
    assert signal.signal(NUMBER, before) == signal.SIG_IGN


def test_a_thread_cannot_watch_signals() -> None:
    caught: list[ConfigError] = []

    def install() -> None:
        try:
            hook(Counter(), [])
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert "main thread only" in str(caught[0])


def test_signals_that_cannot_be_watched_are_refused_and_the_others_put_back() -> None:
    before = signal.getsignal(NUMBER)
    for bad in (signal.SIGKILL, 10_000):
        with pytest.raises(ConfigError, match=f"signal {int(bad)} cannot be handled"):
            save_on_sigterm(Counter(), print, signals=[NUMBER, bad])
    assert signal.getsignal(NUMBER) is before


@pytest.mark.parametrize(("grace", "wait"), [(0, 0), (-1, -2), (5, 5), (5, -1), (float("nan"), 0)])
def test_times_that_make_no_sense_are_refused(grace: float, wait: float) -> None:
    with pytest.raises(ConfigError, match="wait_seconds"):
        hook(Counter(), [], grace_seconds=grace, wait_seconds=wait)


PROGRAM = """
import os, signal, sys
from pathlib import Path
from stoker_torch import save_on_sigterm

class Loader:
    yielded = 0
    def state_dict(self):
        return self.yielded

loader, folder = Loader(), Path(sys.argv[1])
{setup}
with save_on_sigterm(loader, save, wait_seconds={wait}, grace_seconds=100) as preemption:
    while True:
        loader.yielded += 1
        model = loader.yielded
        if model == 1:
            print("ready", flush=True)
        {step}
"""


def ended(folder: Path, *, setup: str, step: str, wait: float = 0) -> subprocess.CompletedProcess[str]:
    """Run the program, send it SIGTERM once it trains, and return how it ended."""
    code = PROGRAM.format(setup=textwrap.dedent(setup), step=step, wait=wait)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            out, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    return subprocess.CompletedProcess([], process.returncode, out, errors)


SAVE = """
model = 0
def save(state):
    (folder / "saved").write_text(f"{state} {model}")
"""


def test_a_terminated_process_saves_and_then_ends_as_if_by_the_signal(tmp_path: Path) -> None:
    result = ended(tmp_path, setup=SAVE, step="pass")
    assert (result.returncode, result.stderr) == (-signal.SIGTERM, "")
    state, model = map(int, (tmp_path / "saved").read_text().split())
    assert model in (state, state - 1)


def test_at_a_checkpoint_model_and_position_agree(tmp_path: Path) -> None:
    step = "model = -1; model = loader.yielded; preemption.checkpoint()"
    result = ended(tmp_path, setup=SAVE, step=step, wait=60)
    assert (result.returncode, result.stderr) == (-signal.SIGTERM, "")
    state, model = map(int, (tmp_path / "saved").read_text().split())
    assert state == model > 0


def test_a_process_that_waits_for_data_is_saved_too(tmp_path: Path) -> None:
    result = ended(tmp_path, setup=SAVE, step="import threading; threading.Event().wait()", wait=0.01)
    assert (result.returncode, result.stderr) == (-signal.SIGTERM, "")
    assert (tmp_path / "saved").read_text() == "1 1"


def test_the_callback_may_end_the_process_in_order(tmp_path: Path) -> None:
    setup = """
    import atexit
    atexit.register(lambda: (folder / "unwound").touch())
    def save(state):
        raise SystemExit(0)
    """
    result = ended(tmp_path, setup=setup, step="pass")
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "unwound").exists()


def test_a_forked_child_does_not_save(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "an earlier test left a handler"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "an earlier test blocks the signal"
    saved = tmp_path / "saved"
    with save_on_sigterm(Counter(), lambda state: saved.touch()):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write_end, b"x")
            time.sleep(60)
            os._exit(1)
        os.read(read_end, 1)  # a signal that comes while the child is being set up would be lost
        os.close(read_end)
        os.close(write_end)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not saved.exists()
