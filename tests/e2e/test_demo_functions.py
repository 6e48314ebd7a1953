"""``stoker demo --functions`` as a program: it ends, reports the result, and leaves nothing."""

from __future__ import annotations

import itertools
import os
import re
import signal
from pathlib import Path

import pytest

from stoker_local._demo.function_run import INGEST, FunctionDemoConfig
from stoker_local.functions import FunctionFaultKind
from stoker_local.functions._config import FunctionFaultInjector
from support.demo import cells, demo, descendants_of, process_parents, read_until, set_misleading_environment

pytestmark = pytest.mark.timeout(400)
TIMEOUT_SECONDS = 600  # longer than the demo itself takes at most
IMAGES = 400
AT_WORK = r" +\d+ s: .* [1-9]\d* of \d+ busy"
"""How a line begins that is written while functions run."""


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's folder for temporary files, current folder and home; misleading settings are in force."""
    set_misleading_environment(monkeypatch, tmp_path)
    return tmp_path


def deadly_seed() -> int:
    """A seed with which the first call of ingest is killed before it can have ended."""
    for seed in itertools.count():
        fault = FunctionFaultInjector(FunctionDemoConfig(seed=seed).faults()).draw(INGEST)
        if fault is not None and fault.kind is FunctionFaultKind.KILL and fault.after_seconds < 0.05:
            return seed
    raise AssertionError("numbers do not end")


def test_the_demo_packs_in_functions_that_are_killed_trains_on_every_image_once_and_leaves_nothing(
    empty_folder: Path,
) -> None:
    with demo("--functions", "--images", str(IMAGES), "--seed", str(deadly_seed()), folder=empty_folder) as process:
        output = read_until(process, AT_WORK)
        family = descendants_of(process.pid)
        rest, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    output += rest
    assert errors == ""
    assert process.returncode == 0, output
    assert "\r" not in output
    assert "\x1b" not in output
    assert f"the epoch had {IMAGES} samples: every image exactly once" in output

    table = {
        row.split()[0]: row.split()[1:] for row in re.findall(r"^  (?:ingest|commit|compact) .*$", output, re.MULTILINE)
    }
    alive, _, cold_starts, calls, failed, killed, *_ = map(int, table["ingest"])
    assert killed >= 1
    assert failed >= 1
    assert calls >= 1 + IMAGES // 80
    assert 1 <= alive < cold_starts
    assert int(table["compact"][3]) >= 1

    assert cells(output, "objects to train from")[0] < cells(output, "objects to train from")[1] == IMAGES
    packed, one_by_one = cells(output, "dollars for requests")
    assert one_by_one == pytest.approx(IMAGES * (0.0004 + 0.005) / 1000)
    assert packed < one_by_one
    assert cells(output, "GETs of an epoch")[0] < 10

    assert len(family) >= 1 + 1
    assert not family & process_parents().keys()
    assert list(empty_folder.iterdir()) == []


def test_ctrl_c_ends_the_demo_and_its_functions(empty_folder: Path) -> None:
    with demo("--functions", "--images", str(IMAGES), folder=empty_folder) as process:
        read_until(process, AT_WORK)
        family = descendants_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process in the foreground
        _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "stoker: interrupted\n")
    assert len(family) >= 1 + 1
    assert not family & process_parents().keys()
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--images", "9"), "--images requires --functions"),
        (("--functions", "--epochs", "2"), "--epochs and --workers cannot be combined with --functions"),
        (("--functions", "--seed", "-1"), "--seed -1 is negative"),
    ],
)
def test_options_that_cannot_be_are_refused(empty_folder: Path, arguments: tuple[str, ...], message: str) -> None:
    with demo(*arguments, folder=empty_folder) as process:
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors.startswith("stoker: ")
    assert message in errors
    assert output == ""
