from __future__ import annotations

import io
from pathlib import Path

import pytest

import stoker
from stoker import cli
from stoker._base.terminal import has_colors, styled
from support.terminal import Terminal


@pytest.mark.parametrize(
    ("environment", "terminal", "pipe"),
    [
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_colours_are_for_terminals_unless_a_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], terminal: bool, pipe: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert has_colors(Terminal()) is terminal
    assert has_colors(io.StringIO()) is pipe
    assert styled("x", "error", Terminal()) == ("\x1b[1;31mx\x1b[0m" if terminal else "x")


def test_an_error_is_red_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert cli.main(["info", "memory://nothing"]) == 1
    assert "\x1b" not in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["info", "memory://nothing"]) == 1
    assert capsys.readouterr().err.startswith("stoker: \x1b[1;31merror:\x1b[0m ")


def test_the_doctor_colours_its_labels_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stoker.Packer(tmp_path, schema={"x": stoker.Array("int64")}) as packer:
        packer.extend({"x": number} for number in range(10))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert cli.main(["doctor", str(tmp_path)]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert "\x1b[32mok    \x1b[0m" in capsys.readouterr().out
