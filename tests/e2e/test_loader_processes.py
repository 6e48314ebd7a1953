"""The loader in real processes: interrupts, ends, forks and spawns, with warnings as errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from support.forked_programs import ForkedPrograms, forked_programs

SAMPLES = 400
_TIMEOUT_SECONDS = 300  # of a hang

PREAMBLE = """
import json, logging, multiprocessing, os, signal, sys, threading, time
logging.getLogger("asyncio").setLevel(logging.ERROR)  # its debug mode reports a busy machine as slow callbacks
from stoker import FetchConfig
from stoker_torch import Loader, save_on_sigterm

URL, FOLDER = sys.argv[1:]

def slow(sample):
    time.sleep(0.01)
    return sample

def stall_after(reads):
    import asyncio
    from stoker._stores.local import LocalStore
    read = LocalStore.get_range
    left = [reads]
    async def stalling(self, *args, **settings):
        left[0] -= 1
        if left[0] < 0:
            await asyncio.Event().wait()
        return await read(self, *args, **settings)
    LocalStore.get_range = stalling

def send_soon(number):
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()

def numbers(batches):
    return [number for batch in batches for number in batch["x"].tolist()]
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("processes") / "train"
    schema = {"x": stoker.Array("int64"), "text": stoker.Text()}
    with stoker.Packer(folder, schema=schema, super_sample_bytes=1000) as packer:
        packer.extend({"x": index, "text": f"sample {index}"} for index in range(SAMPLES))
    return str(folder)


# Newer Pythons warn of every fork beside threads.
FLAGS = ("-X", "dev", "-W", "error", "-W", "ignore:This process:DeprecationWarning")


class Programs:
    """Runs programs that use the data set at a URL and a folder of the test's own."""

    def __init__(self, forked: ForkedPrograms, url: str, folder: Path) -> None:
        self._forked, self._url, self._folder = forked, url, folder

    def _written(self, body: str) -> Path:
        program = self._folder / "program.py"  # a file, for a spawned process runs it again
        program.write_text(PREAMBLE + body)
        return program

    def run(self, body: str, *, returns: int = 0) -> tuple[str, str]:
        """Run a program to its end and return what it wrote to its output and its error stream."""
        program = self._forked.start(self._written(body), self._url, self._folder)
        output, errors = program.communicate(_TIMEOUT_SECONDS)
        assert program.returncode == returns, errors
        return output, errors

    def quiet(self, body: str, *, returns: int = 0) -> str:
        """Run a program that must write nothing to its error stream, and return its output."""
        output, errors = self.run(body, returns=returns)
        assert errors == ""
        return output

    def quiet_from_a_shell(self, body: str) -> str:
        """Run it as :meth:`quiet` does, in an interpreter that begins with it."""
        command = [sys.executable, *FLAGS, str(self._written(body)), self._url, str(self._folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedPrograms]:
    """What forks programs that need not import torch each."""
    with forked_programs(*FLAGS, imports=["stoker_torch"]) as forked:
        yield forked


@pytest.fixture
def programs(forked: ForkedPrograms, url: str, tmp_path: Path) -> Programs:
    return Programs(forked, url, tmp_path)


@pytest.mark.parametrize(
    ("before", "settings"),
    [("stall_after(12)", ""), ("", "transform=slow, workers=1, epochs=None")],
    ids=["for the bucket", "for the pool"],
)
def test_ctrl_c_ends_a_loop_that_waits(programs: Programs, before: str, settings: str) -> None:
    body = f"""
{before}
with Loader(URL, batch_size=40, memory="1MB", {settings}) as loader:
    send_soon(signal.SIGINT)
    while True:
        for batch in loader:
            pass
"""
    output, errors = programs.run(body, returns=-signal.SIGINT)
    assert output == ""
    assert errors.startswith("Traceback")
    assert errors.endswith("KeyboardInterrupt\n")
    assert errors.count("Traceback") == 1
    assert "ignored" not in errors


def test_a_caught_ctrl_c_leaves_no_thread_and_the_place_behind_the_last_batch(programs: Programs) -> None:
    body = """
stall_after(12)
seen = []
with Loader(URL, batch_size=20, memory="1MB", shuffle="none") as loader:
    try:
        for batch in loader:
            if not seen:
                send_soon(signal.SIGINT)
            seen += batch["x"].tolist()
    except KeyboardInterrupt:
        print("interrupted")
print([thread.name for thread in threading.enumerate()])
position = loader.state_dict()["position"]
# A batch may be yielded, and the interrupt come before it is kept.
print(seen == list(range(len(seen))), position - len(seen) in (0, 20), 0 < len(seen) < 400)
"""
    assert programs.quiet(body) == "interrupted\n['MainThread']\nTrue True True\n"


def test_sigterm_in_a_loop_hands_over_a_state_that_continues_exactly(programs: Programs, tmp_path: Path) -> None:
    body = """
seen = []
def save(state):
    with open(f"{FOLDER}/state.json", "w") as file:
        json.dump([state, seen], file)
loader = Loader(URL, batch_size=8, transform=slow, workers=1)
with save_on_sigterm(loader, save, wait_seconds=60, grace_seconds=100) as hook:
    for batch in loader:
        if not seen:
            send_soon(signal.SIGTERM)
        seen += batch["x"].tolist()
        hook.checkpoint()
"""
    programs.quiet(body, returns=-signal.SIGTERM)
    state, seen = json.loads((tmp_path / "state.json").read_text())
    assert 0 < len(seen) < SAMPLES
    assert state["position"] == len(seen)
    rest = """
with open(f"{FOLDER}/state.json") as file:
    state, seen = json.load(file)
with Loader(URL, batch_size=30) as loader:
    loader.load_state_dict(state)
    print(sorted(seen + numbers(loader)) == list(range(400)))
"""
    assert programs.quiet(rest) == "True\n"


@pytest.mark.parametrize(
    ("settings", "end", "returns"),
    [
        ("transform=slow, workers=2", "next(batches)", 0),
        ("transform=slow, workers=2", "loader.close(); batches = iter(loader); next(batches)", 0),
        ("", "for batch in loader: sys.exit(3)", 3),
    ],
    ids=["while the pool works", "reopened", "exit in the loop"],
)
def test_the_interpreter_ends_in_silence_with_a_live_loader(
    programs: Programs, settings: str, end: str, returns: int
) -> None:
    body = f"""
loader = Loader(URL, batch_size=64, {settings})
batches = iter(loader)
next(batches)
{end}
"""
    assert programs.quiet(body, returns=returns) == ""


def test_an_interpreter_that_begins_with_a_program_ends_in_silence_with_a_live_loader(programs: Programs) -> None:
    body = """
loader = Loader(URL, batch_size=64)
batches = iter(loader)
next(batches)
next(batches)
"""
    assert programs.quiet_from_a_shell(body) == ""


def test_an_exit_does_not_wait_for_what_the_pool_has_queued(programs: Programs, tmp_path: Path) -> None:
    body = """
def count(sample):
    with open(f"{FOLDER}/count", "a") as file:
        file.write(".")
    return slow(sample)
loader = Loader(URL, batch_size=100, shuffle="none", transform=count, workers=1)
next(iter(loader))
"""
    programs.quiet(body)
    assert len((tmp_path / "count").read_text()) < SAMPLES


@pytest.mark.parametrize("settings", ["", "transform=slow, workers=2"], ids=["plain", "pool"])
def test_forked_children_use_the_loader_all_at_once_and_end_in_silence(programs: Programs, settings: str) -> None:
    body = f"""
loader = Loader(URL, batch_size=32, shuffle="none", limit=200, {settings})
batches = iter(loader)
next(batches)

def child_that(does, wanted):
    if not (child := os.fork()):
        sys.exit(does() != wanted)  # through the interpreter's own end
    return child

children = [
    child_that(lambda: None, None),
    child_that(lambda: numbers(batches), list(range(32, 200))),
    child_that(lambda: numbers(loader), list(range(200))),
]
print(numbers(batches) == list(range(32, 200)))
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""
    assert programs.quiet(body) == "True\n[0, 0, 0]\n"


def test_a_spawned_process_makes_a_loader_of_its_own(programs: Programs) -> None:
    body = """
def train(state):
    with Loader(URL, batch_size=64) as loader:
        loader.load_state_dict(state)
        sys.exit(0 if len(numbers(loader)) == 400 - 64 else 5)
if __name__ == "__main__":
    with Loader(URL, batch_size=64) as loader:
        next(iter(loader))
        process = multiprocessing.get_context("spawn").Process(target=train, args=(loader.state_dict(),))
        process.start()
        process.join()
        print(process.exitcode)
"""
    assert programs.quiet(body) == "0\n"


def test_a_forked_child_counts_on_from_its_parent_which_counts_for_itself_alone(programs: Programs) -> None:
    body = """
loader = Loader(URL, batch_size=40, shuffle="none", epochs=1, fetch=FetchConfig(hedge=False))
batches = iter(loader)
for _ in range(3):
    next(batches)
before = loader.stats()
assert (before.batches, before.samples) == (3, 120)

def check(stats):
    assert (stats.batches, stats.samples) == (10, 400)
    assert 0 <= stats.misses <= stats.lookups and stats.lookups > before.lookups
    assert (stats.retries, stats.hedge_wins, stats.bad_samples, stats.repeated_samples) == (0, 0, 0, 0)
    assert stats.first_batch_seconds == before.first_batch_seconds
    assert 0 <= stats.bucket_wait_seconds <= stats.wait_seconds <= stats.loop_seconds and 0 <= stats.stall <= 1

if not (child := os.fork()):
    inherited = loader.stats()  # fetching went on until the fork
    assert (inherited.batches, inherited.samples) == (3, 120)
    assert inherited.get_requests >= before.get_requests
    numbers(batches)
    check(loader.stats())
    assert loader.stats().get_requests > before.get_requests
    sys.exit()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert loader.stats().batches == 3
numbers(batches)
check(loader.stats())
super_samples = len(loader.manifest)
assert loader.stats().lookups == super_samples
assert super_samples < loader.stats().get_requests <= super_samples + 3
"""
    assert programs.quiet(body) == "0\n"


def test_interrupts_at_any_moment_lose_nothing_and_leave_nothing(programs: Programs) -> None:
    body = """
import random
loader = Loader(URL, batch_size=7, memory="12KB", window=2, seed=3)
want = [batch["x"].tolist() for _ in range(3) for batch in loader]
loader.set_epoch(0)
got, moments, interrupts, longest_seconds = [], random.Random(1), 0, 0.03
while len(got) < len(want):
    before = len(got)
    timer = threading.Timer(moments.random() * longest_seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        try:
            timer.start()
            while len(got) < len(want):
                for batch in loader:
                    got.append(batch["x"].tolist())
        finally:
            timer.join()
            time.sleep(0.01)
    except KeyboardInterrupt:
        interrupts += 1
    state = loader.state_dict()
    done = state["epoch"] * len(loader) + -(-state["position"] // 7)
    got += want[len(got) : done]  # a batch may be yielded, and the interrupt come before it is kept
    assert len(got) == done
    if done == before:
        longest_seconds *= 1.1  # or a machine that begins slowly would never come to its end
    loader.load_state_dict(state)
assert got == want and interrupts
loader.close()
assert threading.enumerate() == [threading.main_thread()]
"""
    programs.run(body)


def test_a_process_ends_in_seconds_and_as_it_should_while_a_function_is_at_work(programs: Programs) -> None:
    body = """
import torch
from contextlib import suppress
from stoker.errors import StokerError

def stuck(sample):
    threading.Event().wait()

def busy(sample):  # to leave such a thread alone at the end would abort the process
    matrix = torch.ones(200, 200)
    ends = time.monotonic() + 0.3
    while time.monotonic() < ends:
        matrix @ matrix
    return sample

def interrupted(status):
    signal.raise_signal(signal.SIGINT)

def by_status(status):
    sys.exit(status)

def by_error(status):
    raise ValueError("of the training")

def child_that(function, end, status):
    if child := os.fork():
        return child
    entered = threading.Event()
    def transform(sample):
        entered.set()
        return function(sample)
    loader = Loader(URL, batch_size=40, transform=transform, workers=2)
    iteration = iter(loader)
    def ask():
        with suppress(StokerError):
            next(iteration)
    threading.Thread(target=ask, daemon=True).start()
    entered.wait()
    end(status)

began = time.monotonic()
ways = [(stuck, interrupted, -signal.SIGINT), (stuck, by_status, 3), (stuck, by_error, 1), (busy, by_status, 0)]
children = [child_that(*way) for way in ways]
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [status for *_, status in ways])
print(time.monotonic() - began < 60)
"""
    output, errors = programs.run(body)
    assert output == "True\nTrue\n", errors
    assert errors.count("a thread of the loader is still running: transform of sample ") == 3
