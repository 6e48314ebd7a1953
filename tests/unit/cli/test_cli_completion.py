from __future__ import annotations

import builtins
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from stoker import cli


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ve"], ["verify"]),
        (["info", "--js"], ["--json"]),
        (["warm", "be"], ["bench"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["plan", "--shuffle", "w"], ["window"]),
        (["info", "some-f"], ["some-folder"]),
        (["simulate", "--out", "some-"], ["some-folder"]),
    ],
)
def test_bash_completes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: Sequence[str], completed: Sequence[str]
) -> None:
    tmp_path.joinpath("some-folder").mkdir()
    tmp_path.joinpath("some-file").touch() if "info" not in words else None
    line = " ".join(f"'{word}'" for word in ("stoker", *words))
    program = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_stoker; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(
        ["bash", "-c", f"{script(capsys, 'bash')}\n{program}"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == list(completed)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_of_a_shell_is_valid(capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str) -> None:
    text = script(capsys, shell)
    assert "rebuild-manifest" in text
    assert "--keep-versions" in text
    if (program := shutil.which(shell)) is not None:
        file = tmp_path / "script"
        file.write_text(text)
        subprocess.run([program, "-n", file], check=True, capture_output=True)


def test_without_the_library_the_error_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = builtins.__import__

    def missing(name: str, *rest: Mapping[str, object]) -> object:
        if name == "shtab":
            raise ModuleNotFoundError("No module named 'shtab'", name="shtab")
        return inner(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", missing)
    assert cli.main(["completion", "bash"]) == 1
    assert "stoker completion needs shtab; pip install 'stoker[completion]'" in capsys.readouterr().err
