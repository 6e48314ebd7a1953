"""``stoker simulate SCENARIO.toml``: what is shown and written, and what is wrong before anything is simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli import main
from stoker_sim._scenario import Scenario

LEAST = """
[dataset]
super_samples = 20
samples = 10
super_sample_bytes = "1MiB"
[node]
batch_size = 10
"""


def written(path: Path, text: str = "") -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text}\n{LEAST}")
    return str(path)


@pytest.fixture
def never_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(scenario: Scenario) -> None:
        raise AssertionError("this should have been refused before")

    monkeypatch.setattr("stoker_sim._commands.simulate.simulate", refuse)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 2
    return capsys.readouterr().err


def test_what_a_file_says_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path / "a.toml", r'title = "x\u001b[2Jy"' + "\n" + r'bucket.prices_of = "/\u001b[2J"')
    assert main(["simulate", name, "--no-html", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert r"a: x\x1b[2Jy" in shown
    assert all(line.isprintable() for line in shown.splitlines())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.csv", "a.png"]


def test_json_is_json_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path / "a.toml")
    assert main(["simulate", name, "--json", "--out", str(tmp_path / "out")]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["tables"][0]["rows"][-1][found["tables"][0]["columns"].index("requests")] >= 20
    assert found["remarks"][0].startswith("1 node, 20 super-samples")
    assert not (tmp_path / "out").exists()


def test_a_deprecated_field_of_a_file_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path / "a.toml", "bucket.longest_line_seconds = 9")
    assert main(["simulate", name, "--json"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "stoker: warning: BucketModel(longest_line_seconds=…) is deprecated: write max_queue_seconds="


@pytest.mark.usefixtures("never_simulated")
def test_a_place_that_cannot_be_written_to_is_found_out_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = written(tmp_path / "a.toml")
    assert "a.toml cannot be written to: File exists; name another folder" in refused(capsys, name, "--out", name)
    assert "/proc/x cannot be written to" in refused(capsys, name, "--out", "/proc/x")


@pytest.mark.usefixtures("never_simulated")
def test_what_would_be_written_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [written(tmp_path / folder / "a.toml") for folder in ("b", "c")]
    assert "a.csv would be written 2 times" in refused(capsys, *names, "--out", str(tmp_path / "out"))


@pytest.mark.usefixtures("never_simulated")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/dev/zero.toml"], "/dev/zero.toml cannot be read"),
        (["nowhere.toml"], "nowhere.toml cannot be read"),
        (["nothing"], "there is no experiment 'nothing'"),
    ],
)
def test_what_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refused(capsys, *arguments, "--out", str(tmp_path))


def test_an_unusably_slow_bucket_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path / "a.toml", "bucket.total_bytes_per_second = 1000")
    assert "total_bytes_per_second=1000.0" in refused(capsys, name, "--json")
