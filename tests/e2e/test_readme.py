"""The README's example, as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


EXAMPLE, *OTHERS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_examples_run_as_printed_the_first_in_twelve_lines(tmp_path: Path) -> None:
    assert sum(bool(line) for line in EXAMPLE.splitlines()) <= 12
    program = "".join([EXAMPLE, "print('loss', loss.item(), len(batch['label']))\n", *OTHERS])
    command = [sys.executable, "-W", "error", "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert re.fullmatch(r"loss \d+\.\d+ 5\n", ran.stdout)


def test_every_file_that_the_readme_links_to_is_there() -> None:
    root = Path(__file__).parents[2]
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README)}
    assert not [link for link in links if not link.startswith("http") and not (root / link).exists()]
