"""A data set as the map-style data set of PyTorch's DataLoader, in real processes, with warnings as errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import stoker
from support.forked_programs import ForkedPrograms, forked_programs

SAMPLES = 400
_TIMEOUT_SECONDS = 300  # of a hang

PREAMBLE = """
import logging, os, signal, sys, threading
logging.getLogger("asyncio").setLevel(logging.ERROR)  # its debug mode reports a busy machine as slow callbacks
import stoker

URL = sys.argv[1]

def whole(batches):
    seen = []
    for batch in batches:
        assert (batch["image"].shape[1:], str(batch["image"].dtype)) == ((40, 5), "torch.uint8")
        for number, image, text in zip(batch["x"].tolist(), batch["image"], batch["text"], strict=True):
            assert text == f"sample {number}"
            assert (image == number % 251).all()
            seen.append(number)
    return seen
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset") / "train"
    schema = {"x": stoker.Array("int64"), "image": stoker.Array("uint8", (40, 5)), "text": stoker.Text()}
    with stoker.Packer(folder, schema=schema, super_sample_bytes=20_000) as packer:
        for number in range(SAMPLES):
            image = bytes([number % 251]) * 200
            packer.write({"x": number, "image": _array(image), "text": f"sample {number}"})
    return str(folder)


def _array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(40, 5)


# Newer Pythons warn of every fork beside threads.
FLAGS = ("-X", "dev", "-W", "error", "-W", "ignore:This process:DeprecationWarning")


def quiet(body: str, url: str, folder: Path, *, returns: int = 0) -> str:
    """Run a program that must write nothing to its error stream, and return its output."""
    program = folder / "program.py"
    program.write_text(PREAMBLE + body)
    command = [sys.executable, *FLAGS, str(program), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    assert (done.returncode, done.stderr) == (returns, "")
    return done.stdout


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedPrograms]:
    """What forks programs that need not import torch each."""
    with forked_programs(*FLAGS, imports=["torch.utils.data", "stoker"]) as forked:
        yield forked


@pytest.fixture
def quiet_with_torch(forked: ForkedPrograms, url: str, tmp_path: Path) -> Callable[[str], str]:
    """Runs a program as :func:`quiet` does, with torch imported before it begins."""

    def run(body: str) -> str:
        program = tmp_path / "program.py"  # a file, for a spawned process runs it again
        program.write_text(PREAMBLE + body)
        running = forked.start(program, url)
        output, errors = running.communicate(_TIMEOUT_SECONDS)
        assert (running.returncode, errors) == (0, "")
        return output

    return run


@pytest.mark.parametrize(("context", "count"), [("fork", 2), ("spawn", 1)])
def test_worker_processes_of_a_data_loader_deliver_every_sample_once(
    quiet_with_torch: Callable[[str], str], context: str, count: int
) -> None:
    body = f"""
from torch.utils.data import DataLoader
if __name__ == "__main__":
    with stoker.open(URL) as dataset:
        first = dataset[3]["text"]
        workers = dict(num_workers={count}, persistent_workers=True, multiprocessing_context="{context}")
        batches = DataLoader(dataset, batch_size=64, shuffle=True, **workers)
        for epoch in range(2):
            seen = whole(batches)
            print(len(batches), sorted(seen) == list(range(400)), seen != sorted(seen))
        print(dataset[3]["text"] == first)
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("stoker")])
"""
    assert quiet_with_torch(body) == "7 True True\n7 True True\nTrue\n[]\n"


def test_a_data_loader_requests_a_batch_in_one_go(quiet_with_torch: Callable[[str], str]) -> None:
    body = """
from stoker import FetchConfig
from torch.utils.data import DataLoader
with stoker.open(URL, fetch=FetchConfig(hedge=False)) as dataset:
    requests = dataset.stats().get_requests
    print(whole(DataLoader(dataset, batch_size=400)) == list(range(400)))
    print(dataset.stats().get_requests - requests == len(dataset.manifest), len(dataset.manifest) > 3)
"""
    assert quiet_with_torch(body) == "True\nTrue True\n"


@pytest.mark.parametrize("end", ["", "dataset.close(); dataset[5]", "sys.exit(0)", "del dataset"])
def test_the_interpreter_ends_in_silence_with_an_open_data_set(url: str, tmp_path: Path, end: str) -> None:
    assert quiet(f"dataset = stoker.open(URL)\ndataset[0]\n{end}\n", url, tmp_path) == ""


def test_forked_children_read_all_at_once_and_end_in_silence(url: str, tmp_path: Path) -> None:
    body = """
dataset = stoker.open(URL)
dataset[0]
children = []
for first in range(4):
    if not (child := os.fork()):
        found = [int(sample["x"]) for sample in dataset.samples(range(first, 400, 7))]
        sys.exit(found != list(range(first, 400, 7)))  # through the interpreter's own end
    children.append(child)
print([int(sample["x"]) for sample in dataset.samples(range(400))] == list(range(400)))
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""
    assert quiet(body, url, tmp_path) == "True\n[0, 0, 0, 0]\n"


def test_an_interrupt_ends_a_call_that_waits_and_leaves_a_data_set_that_works(url: str, tmp_path: Path) -> None:
    body = """
import asyncio
from stoker._stores.local import LocalStore
read, reading = LocalStore.get_range, threading.Event()
async def stalled(*args, **settings):
    reading.set()
    await asyncio.Event().wait()

def interrupt():
    reading.wait()
    os.kill(os.getpid(), signal.SIGINT)

with stoker.open(URL) as dataset:
    LocalStore.get_range = stalled
    waiting = threading.Thread(target=interrupt)
    waiting.start()
    try:
        dataset[0]
    except KeyboardInterrupt:
        print("interrupted")
    waiting.join()
    LocalStore.get_range = read
    print(dataset[7]["text"])
print(threading.enumerate() == [threading.main_thread()])
"""
    assert quiet(body, url, tmp_path) == "interrupted\nsample 7\nTrue\n"
