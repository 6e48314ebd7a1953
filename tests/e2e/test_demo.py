"""`stoker demo` as a program, and the parts of it that must be right for its figures to mean something."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import Operation, Prices
from stoker._base.meter import MeterReading
from stoker_local import BucketConfig, BucketSpec, bucket_process
from stoker_local._demo import training
from stoker_local._demo.run import TrainingResult, comparison_table, create_reading, find_failures
from stoker_local._demo.screen import Screen
from stoker_local._demo.training import ImageObjects, Timing, new_model
from stoker_torch import Loader
from support.demo import cells, demo, descendants_of, process_parents, read_until, set_misleading_environment
from support.terminal import Terminal

TIMEOUT_SECONDS = 600
EPOCHS, SEED = 3, 15
"""Of a training that learns the demo's task in few steps."""
WORKERS = 2


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's folder for temporary files, current folder and home; misleading settings are in force."""
    set_misleading_environment(monkeypatch, tmp_path)
    return tmp_path


@pytest.mark.timeout(TIMEOUT_SECONDS + 10)
def test_the_demo_trains_both_ways_shows_that_the_loader_stalls_less_and_leaves_nothing(empty_folder: Path) -> None:
    arguments = ("--workers", str(WORKERS), "--epochs", str(EPOCHS), "--seed", str(SEED))
    with demo(*arguments, folder=empty_folder) as process:
        output = read_until(process, "  DataLoader: epoch 1/")
        family = descendants_of(process.pid)
        rest, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    output += rest
    assert errors == ""
    assert process.returncode == 0
    assert "\r" not in output
    assert "\x1b" not in output
    assert f"{WORKERS} worker processes" in output
    assert output.count("epoch ") == 2 * EPOCHS

    assert min(cells(output, "test accuracy")) >= 97
    stalls, gets, dollars = cells(output, "stall"), cells(output, "GETs"), cells(output, "dollars")
    assert stalls[1] < stalls[0]
    assert gets[0] == EPOCHS * 1500
    assert EPOCHS * 10 <= gets[1] <= EPOCHS * 40
    listed = 2 * Prices.load().store("s3://digits").request_dollars(Operation.LIST)
    assert dollars[0] == pytest.approx(gets[0] * 0.0004 / 1000 + listed, abs=1e-6)
    assert dollars[1] == pytest.approx(gets[1] * 0.0004 / 1000, abs=1e-6)

    assert len(family) >= 1 + 1 + WORKERS
    assert not family & process_parents().keys()
    assert list(empty_folder.iterdir()) == []


@pytest.mark.timeout(TIMEOUT_SECONDS + 10)
def test_ctrl_c_ends_the_demo_and_everything_it_started(empty_folder: Path) -> None:
    with demo("--workers", str(WORKERS), folder=empty_folder) as process:
        output = read_until(process, "  DataLoader: epoch 1/")  # with its workers
        family = descendants_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process in the foreground
        _, errors = process.communicate(timeout=300)
    assert "  images " in output
    assert (process.returncode, errors) == (130, "stoker: interrupted\n")
    assert len(family) >= 1 + 1 + WORKERS
    assert not family & process_parents().keys()
    assert list(empty_folder.iterdir()) == []


# --- the data -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both_ways() -> Iterator[None]:
    """A bucket without delays that has the training images as objects and as super-samples."""
    train, _ = training.load_train_and_test()
    config = BucketConfig(buckets=(BucketSpec(name="digits"),))
    with pytest.MonkeyPatch.context() as environment, bucket_process(config) as bucket:
        for name, value in bucket.environment().items():
            environment.setenv(name, value)
        asyncio.run(training.RawImages(train, len(train)).put_all("s3://digits/images"))
        asyncio.run(training.pack("s3://digits/images", "s3://digits/packed", 16 << 10, lambda _: None))
        yield


def as_pairs(images: Any, labels: Any) -> list[tuple[bytes, int]]:
    return sorted((np.asarray(image).tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


@pytest.mark.usefixtures("both_ways")
def test_one_object_per_image_delivers_the_images_and_labels_that_were_uploaded() -> None:
    train, _ = training.load_train_and_test()
    images = ImageObjects("digits", "images/")
    samples = [images[index] for index in range(len(images))]
    images.close()
    found = as_pairs([sample["image"] for sample in samples], [sample["label"] for sample in samples])
    assert found == as_pairs(train.images, train.labels)


@pytest.mark.usefixtures("both_ways")
def test_super_samples_deliver_the_images_and_labels_that_were_uploaded() -> None:
    train, _ = training.load_train_and_test()
    found: list[tuple[bytes, int]] = []
    with Loader("s3://digits/packed", batch_size=100, memory="8MB", epochs=1, decode=training.DECODE) as loader:
        for batch in loader:
            assert batch["image"].shape[1:] == (8, 8, 1)
            found += as_pairs(batch["image"], batch["label"])
    assert sorted(found) == as_pairs(train.images, train.labels)


def test_the_split_is_disjoint_complete_and_the_same_every_time() -> None:
    train, test = training.load_train_and_test()
    again, _ = training.load_train_and_test()
    assert (len(train), len(test)) == (1500, 297)
    assert np.array_equal(train.images, again.images)
    assert train.images.max() == 255
    assert np.bincount(test.labels).min() >= 15


@pytest.mark.parametrize(("epochs", "best"), [(1, 8), (100, 16)])
def test_the_data_loader_gets_the_workers_whose_start_and_epochs_together_take_least(
    monkeypatch: pytest.MonkeyPatch, epochs: int, best: int
) -> None:
    tried = {4: (1.0, 9.0), 8: (2.0, 5.0), 16: (4.0, 4.0), 32: (8.0, 4.5)}  # seconds: to start, of an epoch
    monkeypatch.setattr(training, "ImageObjects", lambda bucket, prefix: None)
    monkeypatch.setattr(training, "_uses_fork", lambda: True)
    monkeypatch.setattr(training, "_measure_workers", lambda images, workers, batch_size: tried[workers])
    told: list[tuple[int, float | None]] = []
    assert (
        training.choose_workers(
            "digits", "images/", 32, epochs, lambda workers, seconds: told.append((workers, seconds))
        )
        == best
    )
    assert told[:2] == [(4, None), (4, 1.0 + epochs * 9.0)]


# --- the comparison -------------------------------------------------------------------------------------------------


def test_both_trainings_start_with_the_same_weights() -> None:
    first, second = new_model(3).state_dict(), new_model(3).state_dict()
    assert all(bool((first[name] == second[name]).all()) for name in first)


def a_reading(gets: int) -> MeterReading:
    return create_reading("s3://digits", {"requests": {"GetObject": gets}, "bytes_out": 2048})


def a_result(accuracy: float, wait_seconds: float, gets: int = 10) -> TrainingResult:
    timing = Timing(total_seconds=12.0, loop_seconds=10.0, wait_seconds=wait_seconds, first_batch_seconds=1.0)
    return TrainingResult(name="one", workers_text="none", accuracy=accuracy, timing=timing, reading=a_reading(gets))


def test_a_model_that_does_not_learn_fails_the_demo() -> None:
    assert find_failures(a_result(0.98, 5.0), a_result(0.98, 1.0), 0.97) == []
    assert len(find_failures(a_result(0.9699, 5.0), a_result(0.98, 1.0), 0.97)) == 1
    assert len(find_failures(a_result(0.5, 5.0), a_result(0.5, 1.0), 0.97)) == 2


def test_a_loader_that_stalls_as_much_fails_the_demo() -> None:
    assert len(find_failures(a_result(0.98, 5.0), a_result(0.98, 5.0), 0.97)) == 1


def test_the_table_is_aligned_and_fits_80_columns() -> None:
    lines = comparison_table(a_result(0.98, 5.0, gets=12_000), a_result(1.0, 0.25), Prices.load())
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) < 80
    assert lines[5].split() == ["stall", "50.0%", "2.5%"]
    assert lines[6].split() == ["GETs", "12,000", "10"]
    assert lines[8].split() == ["dollars", "$0.004800", "$0.000004"]


# --- the screen -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("_eighty_columns")
def test_a_terminal_shows_a_line_that_is_redrawn_cut_at_its_width_and_wiped_at_the_end() -> None:
    terminal = Terminal()
    with Screen(terminal) as screen:
        screen.draw("x" * 200)
        screen.milestone("only elsewhere")
    wipe = "\r\x1b[K"
    assert terminal.getvalue() == f"{wipe}  {'x' * 77}{wipe}"


@pytest.mark.usefixtures("_eighty_columns")
def test_a_block_is_cut_at_the_terminals_height_and_wiped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "4")
    terminal = Terminal()
    with Screen(terminal) as screen:
        screen.draw("one", "two", "three", "four", "five")
        screen.line("stays")
    back = "\r\x1b[2A\x1b[J"
    assert terminal.getvalue() == f"\r\x1b[K  one\n  two\n  three{back}stays\n\r\x1b[K"


@pytest.mark.usefixtures("_eighty_columns")
def test_text_is_wrapped_below_the_text_and_not_below_its_label() -> None:
    stream = io.StringIO()
    Screen(stream).item("why", "because " * 30)
    first, *rest = stream.getvalue().splitlines()
    assert first.startswith("  why      because")
    assert all(line.startswith(" " * 11 + "because") for line in rest)
    assert max(map(len, [first, *rest])) < 80


@pytest.mark.usefixtures("_eighty_columns")
def test_a_pipe_gets_milestones_and_no_redrawn_lines() -> None:
    stream = io.StringIO()
    with Screen(stream) as screen:
        screen.draw("only on a terminal")
        screen.milestone("epoch 1")
    assert stream.getvalue() == "  epoch 1\n"
